"""The section `training.loss` of the configuration: the errors that are minimised, and their weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from ...data.labels import LABELS
from .labels import FRAME_LABELS
from .schema import Section

__all__ = ["LossConfig", "LossScheduleConfig", "epoch_of"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Kind = Literal["mse", "l1", "huber"]
Moment = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)]
"""An epoch (int), or a fraction of max_epochs (float)."""


def _with_weights(base: type[Section], final: bool = False) -> Any:
    """A section with a weight for each label after the keys of `base`."""
    fields: dict[str, Any] = {}
    for name, spec in LABELS.items():
        if final:
            fields[name] = (NotNegative | None, Field(default=None, description="final weight; null: unchanged"))
            continue
        per = (" per atom" if name == "energy" else "") + (", by component" if spec.row else "")
        text = f"weight; errors in {spec.unit}{per}" if spec.unit else "weight"
        fields[name] = (NotNegative, Field(default=spec.default_weight, description=text))
    return create_model("LabelWeights", __base__=base, **fields)


class _Schedule(Section):
    kind: Literal["step", "linear"] = Field(default="step", description="step: at `start`; linear: from start to end")
    start: Moment = Field(default=0.75, description="epoch, or fraction of max_epochs")
    end: Moment = Field(default=1.0, description="linear: where the final weights are reached")


class LossScheduleConfig(_with_weights(_Schedule, final=True)):  # type: ignore[misc]
    """Final weights, reached at once (kind: step), or linearly between two epochs (kind: linear).

    The best epoch is chosen with the final weights, so that losses of all epochs can be compared.
    """

    properties: dict[str, NotNegative] = Field(default={}, description="final weights of further properties")

    @model_validator(mode="after")
    def check_order(self) -> LossScheduleConfig:
        if self.kind == "linear" and type(self.start) is type(self.end) and self.end <= self.start:
            raise ValueError(f"end ({self.end}) must be after start ({self.start})")
        return self


class _Errors(Section):
    kind: Kind = Field(default="mse", description="ℓ: mse, l1 or huber")
    kinds: dict[str, Kind] = Field(default={}, description="ℓ of single properties, as in {forces: l1}")
    huber_delta: Positive = Field(default=0.01, description="error above which huber is linear, in the label's unit")


class LossConfig(_with_weights(_Errors)):  # type: ignore[misc]
    """loss = energy·ℓ(ΔE/N) + forces·ℓ(ΔF) + stress·ℓ(Δσ) + …, each a mean over the labels that are present.

    With weights of frames, ℓ is multiplied by that of its frame.
    """

    properties: dict[str, NotNegative] = Field(
        default={}, description="weights of further properties, 1 where not given"
    )
    config_weights: dict[str, NotNegative] = Field(
        default={}, description="factors of all losses by kind of frame (data.keys.config_type), as in {bulk: 2.0}"
    )
    per_atom: bool = Field(default=True, description="divide energy errors by the number of atoms")
    schedule: LossScheduleConfig | None = Field(
        default=None, description="other weights later: {kind: step or linear, start, end, energy, forces, …}"
    )

    @model_validator(mode="after")
    def check_weights(self) -> LossConfig:
        if not any(getattr(self, name) for name in LABELS) and not any(self.properties.values()):
            raise ValueError("at least one of energy, forces, stress needs a weight above 0")
        return self

    def weight(self, label: str) -> float:
        """Weight of a label by its name in the data, as "forces" or "scalar:gap"."""
        if label in FRAME_LABELS:
            return 0.0
        name = label.partition(":")[2]
        return self.properties.get(name, 1.0) if name else getattr(self, label)

    def kind_of(self, label: str) -> str:
        """ℓ of a label."""
        return self.kinds.get(label.partition(":")[2] or label, self.kind)

    def at(self, epoch: int, max_epochs: int) -> LossConfig:
        """The loss of epoch 0, 1, …; `final` is that of the end.

        Args:
            epoch: counted from 0.
            max_epochs: which fractions are of.
        """
        if self.schedule is None:
            return self
        start, end = (epoch_of(moment, max_epochs) for moment in (self.schedule.start, self.schedule.end))
        if self.schedule.kind == "step":
            share = float(epoch >= start)
        else:
            share = min(1.0, max(0.0, (epoch - start) / max(1, end - start)))
        return self._mixed(share)

    @property
    def final(self) -> LossConfig:
        """The loss after the schedule."""
        return self if self.schedule is None else self._mixed(1.0)

    def _mixed(self, share: float) -> LossConfig:
        assert self.schedule is not None
        given = self.schedule
        changed = {
            name: (1 - share) * getattr(self, name) + share * getattr(given, name)
            for name in LABELS
            if getattr(given, name) is not None
        }
        properties = dict(self.properties)
        for name, weight in given.properties.items():
            properties[name] = (1 - share) * properties.get(name, 1.0) + share * weight
        return self.model_copy(update={**changed, "properties": properties, "schedule": None})


def epoch_of(moment: int | float, max_epochs: int) -> int:
    """The epoch, counted from 0, that a `Moment` means."""
    return moment if isinstance(moment, int) else round(moment * max_epochs)
