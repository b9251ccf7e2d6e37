"""The fields of one Hugging Face config: their values, and everything that is wrong with them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem
from profiles.families import FAMILIES, NESTED
from profiles.family import FIELDS, FOREIGN, FOREIGN_PREFIXES, REQUIRED, Family, Field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from profiles.yamlfile import Document, Mark, Place

__all__ = ["WINDOWED", "Config", "has_experts"]

WINDOWED: Final = ("sliding_attention", "chunked_attention")


def has_experts(family: Family, values: Mapping[str, Any], index: int) -> bool:
    """Whether block ``index`` has experts instead of a dense feed-forward."""
    return (
        family.experts
        and index >= values["first_dense"]
        and index not in values["dense_layers"]
        and (index + family.expert_offset) % values["expert_step"] == 0
    )


class Config:
    """One config with its problems."""

    def __init__(self, document: Document, place: Place) -> None:
        """The config that stands at ``place``; keys with a leading underscore are comments."""
        self._document = document
        self._place = place
        data = document.data
        for part in place:
            data = data[part]
        if not isinstance(data, dict):
            got = document.got(place, data)
            raise InputError(
                Problem(
                    where=document.where(place),
                    message=f"the config is {got}",
                    expected="a mapping of fields",
                )
            )
        self._data = {key: value for key, value in data.items() if not key.startswith("_")}
        if place and "tie_word_embeddings" not in data:  # said once, outside the nested part
            outer = document.data
            for part in place[:-1]:
                outer = outer[part]
            if isinstance(outer.get("tie_word_embeddings"), bool) and place[-1] == "text_config":
                self._data["tie_word_embeddings"] = outer["tie_word_embeddings"]
        self.model_type = ""
        self._family = Family()
        self.problems: list[tuple[Mark, Problem]] = []

    @property
    def is_nested(self) -> bool:
        """Whether this is a model around a language model that is described inside it."""
        nested = self._data.get("model_type") in NESTED
        return nested and isinstance(self._data.get("text_config"), dict)

    def family(self) -> Family:
        """The entry of the config's ``model_type``. Raises where it is not understood."""
        given = self._data.get("model_type")
        known = sorted(FAMILIES, key=lambda name: (-_likeness(str(given), name), name))
        if isinstance(given, str) and given in FAMILIES:
            self.model_type = given
            self._refuse_foreign(FAMILIES[given].beside)
            self._family = self._variant(FAMILIES[given])
            return self._family
        expected = "one of " + ", ".join(known)
        if isinstance(given, str):
            shown = given if len(given) <= _SHOWN else given[:_SHOWN] + "..."
            message = f"the family {shown!r} is not understood"
            self._report("model_type", message, expected, self._what_is_missing())
        elif "model_type" in self._data:
            got = self._document.got((*self._place, "model_type"), given)
            self._report("model_type", f"model_type is {got}", expected)
        else:
            self._report("", "model_type is missing", expected, self._what_is_missing())
        self._refuse_foreign()
        self._document.raise_problems(self.problems)
        raise AssertionError

    def _variant(self, family: Family) -> Family:
        """The entry that is true of this config, of a family whose classes differ by a key."""
        for (key, value), own in family.variants.items():
            if self._get(key) == value:
                return self._variant(own)
        return family

    def _get(self, key: str) -> Any:
        """The value of a key or of a path with dots; None where it is absent."""
        value: Any = self._data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _stands(self, key: str) -> bool:
        """Whether a key or a path with dots is in the file."""
        outer, _, last = key.rpartition(".")
        inside = self._get(outer) if outer else self._data
        return isinstance(inside, dict) and last in inside

    def _what_is_missing(self) -> str:
        """What an unknown config lacks, or that only its family's rules are unknown."""
        needed = ("hidden", "num_layers", "heads", "ffn_hidden", "vocab")
        absent = [
            "/".join(FIELDS[name].keys)
            for name in needed
            if not any(key in self._data for key in FIELDS[name].keys)
        ]
        if absent:
            return "also not in it: " + ", ".join(absent)
        return "missing: its norms, biases and class defaults, an entry in profiles/families.py"

    def _refuse_foreign(self, beside: tuple[str, ...] = ()) -> None:
        """Keys that say that the layers are not plain decoder blocks, but for those ``beside``."""
        for key, value in self._data.items():
            if key in beside or _says_no(value):
                continue
            kind = FOREIGN.get(key) or next(
                (text for start, text in FOREIGN_PREFIXES.items() if key.startswith(start)), None
            )
            if kind:
                self._report(key, f"{key} says that it has {kind}", "a plain decoder")

    def values(self, family: Family) -> dict[str, Any]:
        """Every field of the family; None where a required one is absent or wrong."""
        self._refuse_unused(family)
        groups = {"all"}
        groups |= {"latent"} if family.latent else set()
        groups |= {"experts"} if family.experts else set()
        return {
            name: self._field(name, field, family)
            for name, field in FIELDS.items()
            if field.group in groups
        }

    def _refuse_unused(self, family: Family) -> None:
        """Experts or latent attention in a family whose class has none."""
        for field in FIELDS.values():
            mine = (field.group == "latent" and family.latent) or (
                field.group == "experts" and family.experts
            )
            if field.group == "all" or mine:
                continue
            for key in field.keys:
                value = self._data.get(key)
                if isinstance(value, int) and value > 1:
                    message = f"{key} in a model of type {self.model_type}, which has no such part"
                    self._report(key, message, "a model_type that fits the file")

    def _field(self, name: str, field: Field, family: Family) -> Any:
        keys = self._keys(name)
        default = family.defaults.get(name, field.default)
        if name == "ffn_hidden" and family.experts:
            default = family.defaults.get(name)  # needed only where a layer is dense
        present = [key for key in keys if self._stands(key)]
        if not present:
            if default is REQUIRED:
                hint = self._misspelt(keys)
                self._report("", f"{keys[0]} is missing", " or ".join(keys), hint)
                return None
            return default
        key = present[0]
        value = self._get(key)
        if value is None:
            meaning = default if field.null is REQUIRED else field.null
            if meaning is REQUIRED:
                self._report(key, f"{key} is null", _EXPECTED[field.kind])
                return None
            return meaning
        other = next((k for k in present[1:] if self._get(k) not in (None, value)), None)
        if other is not None and field.default is REQUIRED:
            self._report(other, f"{other} differs from {key}", f"{value}")
        return value if self._is_right(key, value, field) else None

    def _is_right(self, key: str, value: object, field: Field) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        expected = _EXPECTED[field.kind]
        if field.kind in ("size", "count"):
            least = 1 if field.kind == "size" else 0
            right = whole and least <= int(value) <= field.maximum  # type: ignore[call-overload]
            expected += f" from {least} to {field.maximum:,}"
        elif field.kind == "flag":
            right = isinstance(value, bool)
        elif field.kind == "names":
            right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        else:
            right = isinstance(value, list) and all(type(e) is int and e >= 0 for e in value)
        if not right:
            got = self._document.got((*self._place, *key.split(".")), value)
            self._report(key, f"{key} is {got}", expected)
        return right

    def _misspelt(self, keys: tuple[str, ...]) -> str:
        close = {
            match
            for key in keys
            for match in difflib.get_close_matches(key, self._data, n=1, cutoff=0.85)
        }
        return f"is {' or '.join(sorted(close))} misspelt?" if close else ""

    def check(self, family: Family, values: Mapping[str, Any]) -> None:
        """How the fields fit together, as far as they were read."""
        for key, wanted in family.must.items():
            self._check_says(key, wanted)
        hidden, heads, kv_heads = values["hidden"], values["heads"], values["kv_heads"]
        if hidden and heads and not values["head_dim"] and not family.latent and hidden % heads:
            message = f"hidden size {hidden} over {heads} heads"
            self._report(self._key("heads"), message, "heads that divide it, or head_dim")
        if heads and kv_heads and heads % kv_heads and not family.latent:
            key = self._key("kv_heads")
            origin = "" if key else " (the class default)"
            message = f"{heads} heads over {kv_heads} key/value heads{origin}"
            self._report(key, message, "key/value heads that divide the heads")
        if family.position == "learned" and values["max_seq_len"] is None:
            key = self._key("max_seq_len") or self._keys("max_seq_len")[0]
            message = f"{key} is not there, and the model has a table of positions"
            self._report(self._key("max_seq_len"), message, "its number of rows")
        if hidden and values["embedding_width"] not in (None, hidden):
            message = "an embedding of another width than the blocks is not understood"
            self._report(self._key("embedding_width"), message, str(hidden))
        if family.latent and values["qkv_bias"]:
            message = "attention_bias with latent attention is not understood"
            self._report("attention_bias", message, "false")
        kinds = values["layer_types"] or ()
        for kind in sorted(set(kinds) - {"full_attention", *WINDOWED}):
            message = f"layer_types has {kind}"
            self._report("layer_types", message, "full_attention or sliding_attention")
        if kinds and values["num_layers"] and len(kinds) != values["num_layers"]:
            message = f"{len(kinds)} layer_types for {values['num_layers']} layers"
            self._report("layer_types", message, "one a layer")
        if family.experts:
            self._check_experts(family, values)

    def _check_says(self, key: str, wanted: tuple[object, ...]) -> None:
        if self._get(key) not in wanted:
            shown = str(wanted[0]).lower() if isinstance(wanted[0], bool) else str(wanted[0])
            message = f"{key} is not {shown}: that variant is not understood"
            self._report(key if self._stands(key) else "", message, shown)

    def _check_experts(self, family: Family, values: Mapping[str, Any]) -> None:
        experts, top_k, layers = values["num_experts"], values["top_k"], values["num_layers"]
        if experts and top_k and top_k > experts:
            message = f"a token meets {top_k} of {experts} experts"
            self._report(self._key("top_k"), message, f"at most {experts}")
        placing = [values[name] for name in ("first_dense", "dense_layers", "expert_step")]
        if layers is None or None in placing:
            return
        if outside := [index for index in values["dense_layers"] if index >= layers]:
            message = f"mlp_only_layers names layer {outside[0]}"
            self._report("mlp_only_layers", message, f"layers 0 to {layers - 1}")
        dense = any(not has_experts(family, values, index) for index in range(layers))
        if dense and values["ffn_hidden"] is None and not self._has("ffn_hidden"):
            keys = self._keys("ffn_hidden")
            message = f"{keys[0]} is missing, and some layers are dense"
            self._report("", message, " or ".join(keys))

    def _has(self, name: str) -> bool:
        return any(self._get(key) is not None for key in self._keys(name))

    def _key(self, name: str) -> str:
        """The key that a field goes by in this config, empty if it is not there."""
        return next((key for key in self._keys(name) if self._stands(key)), "")

    def _keys(self, name: str) -> tuple[str, ...]:
        return self._family.keys.get(name, FIELDS[name].keys)

    def _report(self, key: str, message: str, expected: str = "", hint: str = "") -> None:
        place = (*self._place, *key.split(".")) if key else self._place
        problem = Problem(
            where=self._document.where(place), message=message, expected=expected, hint=hint
        )
        self.problems.append((self._document.mark(place), problem))


_EXPECTED: Final = {
    "size": "a whole number",
    "count": "a whole number",
    "flag": "true or false",
    "indices": "a list of layer numbers",
    "names": "a list of names, one a layer",
}


_SHOWN: Final = 100


def _says_no(value: object) -> bool:
    """Whether a key's value means that the model does not have that part. In a list that says it
    layer by layer 1 is plain attention.
    """
    if isinstance(value, list):
        return all(each == 1 for each in value)
    return value in (None, False, 0, "") or value == {}


def _likeness(given: str, name: str) -> float:
    return difflib.SequenceMatcher(None, given, name).ratio()
