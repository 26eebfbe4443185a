"""Weights of frames and of kinds of frames in the loss: checks before training, and a line of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...data.kinds import CONFIG_TYPE, kind_code
from ...errors import BadConfig, BadData
from ...registry import did_you_mean
from ..config.labels import LOSS_WEIGHT
from ..steps.batches import Frames, in_order

if TYPE_CHECKING:
    from ..config.config import Config

__all__ = ["weight_keys", "weight_notes"]

_AT_ONCE = 1024  # frames
_TOLD = 20  # words in a message


def weight_keys(config: Config) -> dict[str, str]:
    """What is read of the data for the weights of frames: label -> its name there."""
    keys, loss = config.data.keys, config.training.loss
    found = {} if keys.weight is None else {LOSS_WEIGHT: keys.weight}
    return {**found, CONFIG_TYPE: keys.config_type} if loss.config_weights else found


def weight_notes(config: Config, subsets: Mapping[str, Frames]) -> Iterator[str]:
    """How many training frames have which weight, in words.

    Raises:
        BadConfig: no frame of any subset is of a kind that has a weight.
        BadData: the weight of a frame is negative.
    """
    kinds = {kind_code(word): word for word in config.training.loss.config_weights}
    counts = {name: dict.fromkeys(kinds, 0) for name in subsets}
    own = 0
    if not weight_keys(config):
        return
    for name, frames in subsets.items():
        for part in in_order(len(frames), _AT_ONCE):
            labels = frames.data.batch(frames.indices[part]).labels
            if CONFIG_TYPE in labels:
                codes, number = np.unique(labels[CONFIG_TYPE].numpy(), return_counts=True)
                for code, n in zip(codes.tolist(), number.tolist(), strict=True):
                    if code in kinds:
                        counts[name][code] += n
            if LOSS_WEIGHT in labels:
                weights = labels[LOSS_WEIGHT].numpy()
                if (weights < 0).any():
                    where = frames.name(part[int(np.flatnonzero(weights < 0)[0])])
                    raise BadData(f"{where}: its weight ({config.data.keys.weight}) must not be negative")
                own += int((~np.isnan(weights)).sum()) if name == "train" else 0
    for code, word in kinds.items():
        if not any(count[code] for count in counts.values()):
            known = sorted(set().union(*(frames.data.kinds for frames in subsets.values())))
            hint = did_you_mean(word, known) or "."
            there = f"Known: {', '.join(known[:_TOLD])}" if known else "See data.keys.config_type"
            raise BadConfig(
                f"training.loss.config_weights: no frame has {config.data.keys.config_type}={word}{hint} {there}"
                f"{' …' if len(known) > _TOLD else ''}"
            )
    parts = [f"{config.training.loss.config_weights[word]:g} for {word} ({counts['train'][code]} frames)"
            for code, word in kinds.items()]  # fmt: skip
    parts += [f"their own for {own} frames"] if own else []
    yield f"weights in the loss: {', '.join(parts)}; 1 for all others"
