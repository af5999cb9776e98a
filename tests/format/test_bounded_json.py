"""JSON: what is asked for is what json.loads gives, all else is skipped, damage is refused."""

import json
import random

import pytest

from pcrshard.errors import CorruptIndex
from pcrshard.format.bounded_json import MAX_VALUE, object_spans, read_list, read_value

VALUES = [0, -1.5e3, True, None, "", 'a "b" \\ {[,:]}', "\u20ac", [], {}, [[1, {"a": "}"}], "]"]]


def made(text, names=("a", "b")):
    return {name: read_value(text, span) for name, span in object_spans(text, names).items()}


def test_values_are_those_of_json():
    """Whatever the values around it, a value is what json.loads gives."""
    dice = random.Random(5)
    for _ in range(200):
        whole = {name: dice.choice(VALUES) for name in dice.sample("abcdef", 4)}
        text = json.dumps(whole, indent=dice.choice([None, 1]), ensure_ascii=dice.random() < 0.5)
        expected = {name: whole[name] for name in "ab" if name in whole}
        assert made(f" {text}\n") == expected, text


def test_items_of_a_list():
    """A list is read item by item."""
    text = json.dumps({"a": VALUES})
    assert list(read_list(text, object_spans(text, ("a",))["a"])) == VALUES
    assert list(read_list(" [ ] ", (0, 5))) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"a"', '{"a":', '{"a": 1', '{"a": 1}}', '{"a": 1} x', '{"a": 1,}', "{,}",
        '{"a" 1}', "{a: 1}", '{"a": 1 "b": 2}', '{"a": 1, "a": 2}', '{"a": [1}', '{"a": "x}',
        '{"a": }', '{"a": 1]', '{"x": [[[}',
    ],
)  # fmt: skip
def test_damage_is_refused(text):
    """What is cut, or has a name twice, is no object."""
    with pytest.raises((CorruptIndex, ValueError)):
        made(text)


def test_another_file_is_shown():
    """The page of a proxy in place of an index is told by its first words."""
    with pytest.raises(CorruptIndex, match="got '<html>log in</html>'"):
        made("<html>log in</html>")


def test_a_value_has_a_bound():
    """A long value of a known name is refused, one of an unknown name is skipped."""
    long = "[" + "[]," * MAX_VALUE + "1]"
    assert made(f'{{"x": {long}, "a": 1}}') == {"a": 1}
    with pytest.raises(CorruptIndex, match="at most 65536 characters"):
        made(f'{{"a": {long}}}')


def test_depth_costs_nothing():
    """A value of any depth is skipped without recursion."""
    deep = "[" * 200_000 + "]" * 200_000
    assert made(f'{{"x": {deep}, "a": 1}}') == {"a": 1}
