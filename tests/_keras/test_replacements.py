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


def test_a_replacement_is_listed_until_it_is_restored():
    original = vars(Owner)["method"]
    place = (Owner, "method")
    first, second = replacements.Replacements(), replacements.Replacements()
    before = replacements.replaced()
    first.set({place: ours})
    second.set({(Owner, "value"): lambda value: value + 1})
    assert set(replacements.replaced()) - set(before) == {
        place,
        (Owner, "value"),
    }
    assert first.places() == [place]
    first.set({})
    second.set({})
    assert replacements.replaced() == before
    assert vars(Owner)["method"] is original
    assert Owner.value == 1


def test_a_place_that_two_have_replaced_is_listed_once():
    place = (Owner, "method")
    first, second = replacements.Replacements(), replacements.Replacements()
    before = replacements.replaced()
    first.set({place: ours})
    second.set({place: ours})
    assert replacements.replaced().count(place) == 1
    second.set({})
    first.set({})
    assert replacements.replaced() == before
    assert Owner.method() == "theirs"


def test_a_swapped_attribute_comes_back_or_goes():
    owner = Owner()
    owner.value = 2
    with contextlib.ExitStack() as undo:
        replacements.swap(undo, owner, "value", 3)
        replacements.swap(undo, owner, "other", 4)
        assert (owner.value, owner.other) == (3, 4)
    assert vars(owner) == {"value": 2}
