"""Keys, scopes, namespaces and fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.tokens.hashing import (
    namespace_id,
    prefix_keys,
    rolling_fingerprints,
    row_fingerprints,
    scope_id,
)

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=60)
fields = st.dictionaries(st.sampled_from(["a", "b", "ab"]), st.text(max_size=4) | st.none())


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@given(fields, fields)
def test_scopes_are_equal_only_for_equal_fields(left: dict, right: dict) -> None:
    def given_fields(named: dict) -> dict:
        return {name: value for name, value in named.items() if value is not None}

    same = given_fields(left) == given_fields(right)
    assert (scope_id(**left) == scope_id(**right)) == same
    assert len(scope_id(**left)) == 16


def test_a_scope_field_cannot_pass_for_another_by_its_text() -> None:
    names = {
        scope_id(cache_salt="x", lora_name="y"),
        scope_id(cache_salt="y", lora_name="x"),
        scope_id(cache_salt='x","lora_name":"y'),
        scope_id(cache_salt="xy"),
        scope_id(lora_name="xy"),
        scope_id(cache_salt=""),
        scope_id(),
    }
    assert len(names) == 7


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), json_values))
def test_a_namespace_does_not_depend_on_the_order_of_its_fields(named: dict) -> None:
    backwards = dict(reversed(list(named.items())))
    assert namespace_id(named) == namespace_id(backwards)


def test_values_of_other_types_give_other_namespaces() -> None:
    values: list[object] = [1, "1", 1.0, True, None, "None", [1], {"1": 1}, "[1]"]
    assert len({namespace_id({"field": value}) for value in values}) == len(values)


@pytest.mark.parametrize("value", [b"bytes", object(), {1: "key is no text"}, [{2: 3}], {4}])
def test_a_value_that_can_be_written_in_two_ways_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        namespace_id({"field": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_namespace_of_a_float_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="float"):
        namespace_id({"field": value})


@given(token_lists, st.integers(1, 9))
def test_there_is_a_key_for_each_whole_chunk(tokens: list[int], size: int) -> None:
    keys = prefix_keys(array(tokens), size, b"scope")
    assert len(keys) == len(tokens) // size
    assert all(len(key) == 16 for key in keys)
    assert len(set(keys)) == len(keys)


@given(token_lists, st.integers(1, 9), st.data())
def test_keys_can_be_had_piece_by_piece(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole = prefix_keys(array(tokens), size, b"scope")
    first = data.draw(st.integers(0, len(whole)))
    parent = whole[first - 1] if first else None
    assert prefix_keys(array(tokens), size, b"scope", first, parent) == whole[first:]
    rest = array(tokens)[first * size :]
    assert prefix_keys(rest, size, b"scope", parent=parent) == whole[first:]


@given(token_lists.filter(bool), st.integers(1, 9), st.data())
def test_a_key_depends_on_every_token_up_to_its_chunks_end_and_on_no_other(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = array(tokens)
    changed[place] ^= 1
    before, after = (prefix_keys(each, size, b"scope") for each in (array(tokens), changed))
    chunk = place // size
    assert before[:chunk] == after[:chunk]
    assert set(before[chunk:]).isdisjoint(after[chunk:])


def test_scopes_share_no_key() -> None:
    tokens = array(list(range(64)))
    left, right = (prefix_keys(tokens, 8, scope_id(cache_salt=salt)) for salt in "ab")
    assert set(left).isdisjoint(right)


def test_keys_from_the_middle_of_a_prompt_need_the_key_before() -> None:
    with pytest.raises(ValueError, match="chunk 1"):
        prefix_keys(array(list(range(64))), 8, b"scope", start=1)


def test_names_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np\n"
        "from kvloom.tokens.hashing import *\n"
        "scope = scope_id(lora_name='l', cache_salt='s')\n"
        "tokens = np.arange(100, dtype=np.int32)\n"
        "print(scope.hex(), namespace_id({'b': [1, None], 'a': {'y': 1.5, 'x': True}}),\n"
        "      [key.hex() for key in prefix_keys(tokens, 16, scope)],\n"
        "      rolling_fingerprints(tokens, 64).tolist())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "31337")
    }
    assert len(printed) == 1
    # Stored blocks are found by these names: changing them makes every store unreachable.
    assert scope_id(lora_name="l", cache_salt="s").hex() in printed.pop()


@given(token_lists, st.integers(1, 20))
def test_windows_have_the_fingerprint_of_their_tokens_alone(tokens: list[int], width: int) -> None:
    prints = rolling_fingerprints(array(tokens), width)
    assert len(prints) == max(len(tokens) - width + 1, 0)
    for at, fingerprint in enumerate(prints.tolist()):
        alone = array(tokens[at : at + width])
        assert rolling_fingerprints(alone, width).tolist() == [fingerprint]
        assert row_fingerprints(alone[None]).tolist() == [fingerprint]


def test_fingerprints_see_the_order_of_tokens_and_each_single_one() -> None:
    texts = [[1, 2, 3, 4], [2, 1, 3, 4], [4, 3, 2, 1], [1, 2, 3, 5], [0, 2, 3, 4], [1, 2, 3, -4]]
    assert len({int(rolling_fingerprints(array(each), 4)[0]) for each in texts}) == len(texts)
