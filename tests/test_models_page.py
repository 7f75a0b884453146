"""docs/models.md says what the tables and the installed transformers say."""

from family_zoo import zoo
from models_page import PAGE, page, result_of, rows
from searching import OLDEST, is_oldest


def test_the_page_is_what_make_models_writes():
    written = PAGE.read_text()
    listed = rows(written)
    of_oldest = {name for name, (_, _, since, *_) in listed.items() if since == OLDEST}
    if is_oldest():
        assert of_oldest == zoo().keys()
        assert {name: listed[name][-1] for name in of_oldest} == {name: result_of(name) for name in of_oldest}
    else:
        assert written.startswith(page(of_oldest) + "\n## "), "run `make models`"
