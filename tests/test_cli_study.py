"""`vismoe eval STUDY`: every study is there, says what it does, and gets its own flags."""

import pytest

from vismoe.cli import main as cli
from vismoe.cli import study as cli_study


@pytest.mark.parametrize("name", cli_study.STUDIES)
def test_every_study_has_a_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", name, "--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", name, "--hlep"])
    assert ended.value.code == 2 and "--hlep (did you mean --help?)" in capsys.readouterr().err


def test_flags_go_to_the_study_and_its_exit_code_comes_back(monkeypatch):
    given = []
    module = type("Study", (), {"main": staticmethod(lambda arguments: given.append(arguments) or 3)})
    monkeypatch.setattr(cli_study.importlib, "import_module", lambda name: module)
    assert cli.main(["eval", "pruning", "--questions", "9"]) == 3
    assert given == [["--questions", "9"]]


def test_studies_are_listed_where_eval_explains_itself(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    out = capsys.readouterr().out
    assert all(f"vismoe eval {name} " in out for name in cli_study.STUDIES)
