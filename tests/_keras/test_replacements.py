"""Replacements are listed while they are active, and restored."""

import contextlib

from tfmix._keras import replacements


class Owner:
    @staticmethod
    def method():
        return "theirs"

    value = 1


def ours(original):
    return lambda: "ours"


def test_a_place_is_listed_once_until_all_have_restored_it():
    original, place = vars(Owner)["method"], (Owner, "method")
    first, second = replacements.Replacements(), replacements.Replacements()
    before = replacements.replaced()
    other = (Owner, "value")
    first.set({place: ours})
    second.set({place: ours, other: lambda value: value + 1})
    listed = replacements.replaced()
    assert set(listed) - set(before) == {place, other}
    assert listed.count(place) == 1
    assert first.places() == [place]
    assert (Owner.method(), Owner.value) == ("ours", 2)
    second.set({})
    assert Owner.method() == "ours"
    first.set({})
    assert replacements.replaced() == before
    assert vars(Owner)["method"] is original
    assert Owner.value == 1


def test_a_swapped_attribute_comes_back_or_goes():
    owner = Owner()
    owner.value = 2
    with contextlib.ExitStack() as undo:
        replacements.swap(undo, owner, "value", 3)
        replacements.swap(undo, owner, "other", 4)
        assert (owner.value, owner.other) == (3, 4)
    assert vars(owner) == {"value": 2}
