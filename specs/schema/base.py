"""What every section of the schema shares: unknown keys are refused, values are frozen, numbers are finite."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A closed, immutable part of a spec."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, allow_inf_nan=False, populate_by_name=True, protected_namespaces=()
    )


# Upper bounds keep a mistyped spec from asking for absurd allocations; they are far above any model in use. Real
# numbers stay within what fp32 holds.
Count = Annotated[int, Field(ge=1, le=2**24)]
Width = Annotated[int, Field(ge=1, le=2**22)]
Index = Annotated[int, Field(ge=0, le=2**24)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e30)]
Positive = Annotated[float, Field(gt=0.0, le=1e30)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
