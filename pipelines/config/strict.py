"""What all settings share: strict, frozen groups, and the kinds of text in them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Text = Annotated[str, Field(min_length=1)]
"""Where an empty text is most likely a shell variable that was not set."""

TextOrList = Annotated[
    Annotated[Text, Tag("text")] | Annotated[tuple[Text, ...], Field(min_length=1), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "text"),
]


class Strict(BaseModel):
    """A frozen group of settings: an unknown key or a value of another type is an error, never a guess."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,  # for docs/configuration.md
    )
