"""What the YAML file of a plan may hold: every key, with its type; those without a default are required.

What parts of a plan say about one another (a row's checkpoint, a claim's rows) is checked where plans are built.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from isentrope.utils.messages import format_value, suggest

Strings = tuple[StrictStr, ...]
WholeNumbers = tuple[StrictInt, ...]
Files = Annotated[Strings, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
# what was expected, by the kind of a mistake
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "keys and values",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "keys and values",
    "string_type": "a string",
    "tuple_type": "a list",
}


class Section(BaseModel):
    """Keys and values of a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}{suggest(key, cls.model_fields)}")
        return data

    @classmethod
    def read(cls, where: str, data: Any) -> Self:
        """Check the content of a file.

        Raises:
            ValueError: The first mistake, after `where` and the keys that lead to it.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ValueError(_explain(where, error)) from None

    def given(self, *without: str) -> dict[str, Any]:
        """Return the values that the file has, for a class that has defaults of its own."""
        return {key: getattr(self, key) for key in self.model_fields_set if key not in without}


def _explain(where: str, errors: ValidationError) -> str:
    """Write the first mistake as one line; keys that are missing in the same place are named together."""
    error, *others = errors.errors(include_url=False)
    kind, place = error["type"], error["loc"]
    if kind == "missing":
        place = place[:-1]
        missing = [
            str(each["loc"][-1]) for each in (error, *others) if each["type"] == kind and each["loc"][:-1] == place
        ]
        problem = f"missing {', '.join(missing)}"
    elif kind == "value_error":
        problem = str(error["ctx"]["error"])
    else:
        problem = f"expected {EXPECTED.get(kind, error['msg'])}, got {format_value(error['input'])}"
    steps = (f"item {step + 1}" if isinstance(step, int) else step for step in place)
    return ": ".join((where, *steps, problem))


class Decoder(Section):
    """A causal model, and how it is loaded."""

    model: StrictStr
    gguf_file: StrictStr | None = None
    dtype: StrictStr | None = None
    device: StrictStr | None = None
    chat: StrictBool | None = None


class Retrieval(Section):
    """Retrieval in plans for causal models; see `RetrievalConfig`."""

    tasks: Strings
    lengths: WholeNumbers
    depths: tuple[StrictFloat, ...] = ()
    examples: StrictInt = 0
    seed: StrictInt = 0
    score: StrictStr = ""
    text: Files = ()
    recipes: Strings = ()
    fillers: Strings = ()
    ceiling: StrictInt | None = None


class CausalFile(Section):
    """A plan for a causal model."""

    decoder: Decoder
    texts: Files
    edges: WholeNumbers
    recipes: Strings
    title: StrictStr | None = None
    documents: StrictInt = 8
    retrieval: Retrieval | None = None


class ComparisonPerplexity(Section):
    """Documents of a comparison."""

    edges: WholeNumbers
    documents: StrictInt
    texts: dict[str, StrictStr]


class ComparisonRetrieval(Section):
    """Questions of a comparison."""

    tasks: Strings
    lengths: WholeNumbers
    depths: tuple[StrictFloat, ...]
    examples: StrictInt
    texts: dict[str, StrictStr | None]
    ceiling: StrictInt | None = None
    recipes: Strings | None = None


class ComparisonFile(Section):
    """A comparison of many recipes."""

    recipes: Strings
    title: StrictStr | None = None
    dtype: StrictStr = "auto"
    perplexity: ComparisonPerplexity | None = None
    retrieval: ComparisonRetrieval | None = None


class CheckpointEntry(Section):
    """A model of a plan for masked models; see `Checkpoint`."""

    shipped: StrictStr | None = None
    path: StrictStr | None = None
    train: dict[str, Any] | None = None
    seeded: StrictBool = True


class Row(Section):
    """A row of the results table; see `PlanRow`."""

    method: StrictStr
    checkpoint: StrictStr
    recipe: StrictStr
    variant: StrictStr = "plain"
    fit: StrictBool = False


class Method(Section):
    """The rows of a method's variants; the checkpoint `cosine` is the one with CosScale `alpha`."""

    method: StrictStr
    recipe: StrictStr
    checkpoint: StrictStr | None = None
    cosine: StrictStr | None = None
    alpha: StrictInt | StrictFloat = 128
    infoscale: StrictStr = "infoscale:count=sequence"
    variants: Strings = ()


class Protocol(Section):
    """What is masked; see `MaskingProtocol`."""

    name: StrictStr = ""
    positions: StrictInt | None = None
    share: StrictFloat = 0.0
    seed: StrictInt = 0
    batch: StrictInt = 0


class MaskedFile(Section):
    """A plan for masked models; see `MaskedPlan`."""

    title: StrictStr
    lengths: WholeNumbers
    label: StrictStr = ""
    rows: tuple[Row, ...] = ()
    methods: tuple[Method, ...] = ()
    variants: Strings = ()
    checkpoints: dict[str, CheckpointEntry] = {}
    protocol: Protocol = Protocol()
    train_length: StrictInt = 0
    seeds: WholeNumbers = ()
    entropy: StrictBool = True
    data: StrictStr | None = None
    claims: tuple[dict[str, Any], ...] = ()
    notes: Strings = ()
