"""An index of a store whose checksum is right, and which says what no index says: refused with the file named.

Somebody who edits an index can make the checksum fit; what is in it is still checked as data of strangers.
"""

import copy
import json

import pytest
import small_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples

from vismoe.errors import CheckpointError
from vismoe.store.index import CHECKSUM, checksum_of, index_path, read_index
from vismoe.store.pack import pack
from vismoe.types import Format

FORMATS = (Format.RAW, Format.LOSSLESS, Format.INT4)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from(
        [2**31, 2**63, 10**30, -(10**30), 0.0, 1.5, -0.0, 1e300, "", "x", "float33", "bool", "abs", "int4", "..", [], {}, [[]]]
    ),
    st.lists(st.integers(-1, 3), max_size=5),
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{format: (the checkpoint, the folder of its store, what its index says)}."""
    folder = tmp_path_factory.mktemp("fuzzed")
    checkpoint = small_checkpoints.small(folder)
    found = {}
    for format in FORMATS:
        out = folder / f"store-{format}"
        pack(checkpoint.source, out, checkpoint.contents(format))
        found[format] = checkpoint, out, json.loads(index_path(out, format).read_bytes())
    return found


@st.composite
def places(draw, value):
    """The path of something in a JSON value: each thing as likely as those beside it, however much lies in it."""
    path = ()
    while isinstance(value, dict | list) and value and (not path or draw(st.integers(0, 4))):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        path, value = (*path, key), value[key]
    return path


def edited(value, path, how, odd):
    """A copy in which one thing is another one, left out, or there twice."""
    value = copy.deepcopy(value)
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    if how == "left out":
        del owner[path[-1]]
    elif how == "twice" and isinstance(owner, list):
        owner.insert(path[-1], copy.deepcopy(owner[path[-1]]))
    else:
        owner[path[-1]] = odd
    return value


@pytest.mark.budget(4)
@settings(max_examples=examples(250))
@given(st.sampled_from(FORMATS), st.data())
def test_an_edited_index_with_a_valid_checksum_is_refused_or_says_the_same(stores, format, data):
    checkpoint, folder, value = stores[format]
    value = {name: inner for name, inner in value.items() if name != CHECKSUM}
    path = data.draw(places(value))
    wrong = edited(value, path, data.draw(st.sampled_from(["changed", "left out", "twice"])), data.draw(ODD))
    file = index_path(folder, format)
    file.write_text(json.dumps({**wrong, CHECKSUM: checksum_of(wrong)}))
    try:
        opened = checkpoint.open(folder, format)
    except CheckpointError as error:
        assert str(folder) in str(error) and "Fix: " in str(error)
        return
    opened.close()
    ours = read_index(folder, format)
    assert ours.to_json() | {"records": 0} == value | {"records": 0}
    assert [record[:3] for record in wrong["records"]] == [record[:3] for record in value["records"]]  # a checksum may differ


def test_an_index_whose_own_checksum_is_wrong_is_refused(stores):
    """A record's checksum is a number that nothing else contradicts."""
    checkpoint, folder, value = stores[Format.RAW]
    *place, checksum = value["records"][0]
    wrong = value | {"records": [[*place, checksum ^ 1], *value["records"][1:]]}
    index_path(folder, Format.RAW).write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        checkpoint.open(folder, Format.RAW)
