"""What all replies share: unknown fields, words of a newer server, pages."""

from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue

T = TypeVar("T")
Item = TypeVar("Item")
# The context in which a client validates a reply: words that it does not know are accepted.
FROM_SERVER = {"from_server": True}


class Reply(BaseModel):
    """What the server sends: fields of a newer server are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), defer_build=True)


class PageReply(Reply, Generic[Item]):
    """A page of a list; ``next_cursor`` continues it and is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


def _known_or_newer(
    value: object, known: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> object:
    try:
        return known(value)
    except ValidationError:
        if info.context == FROM_SERVER and isinstance(value, str):
            return value
        raise


class _Open:
    """Validates as ``_known_or_newer``; the JSON schema has the known words alone."""

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # noqa: ANN401 (a type)
        handler: GetCoreSchemaHandler,
    ) -> Any:  # noqa: ANN401 (pydantic's schema)
        known, _text = get_args(source)
        return handler.generate_schema(
            Annotated[known, WrapValidator(_known_or_newer), PlainSerializer(str)]
        )

    def __get_pydantic_json_schema__(
        self,
        schema: Any,  # noqa: ANN401 (pydantic's schema)
        handler: GetJsonSchemaHandler,
    ) -> JsonSchemaValue:
        return handler(schema["schema"])


# Words of which a newer server may have more: to the server the known ones, to the client and
# its type checker any text beside them.
Open = Annotated[T | str, _Open()]
