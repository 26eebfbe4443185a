"""Replay: structures with the predictions of the potential that a fine-tuning starts from, as further training frames.

A fine-tuned network forgets what the new frames do not show. Frames that it labelled itself before the training hold it
to what it knew (A. Robins, Connect. Sci. 7, 123 (1995)).
"""

from __future__ import annotations

import numpy as np

from ...data import Sample, open_dataset
from ...data.collate import select
from ...data.dataset import ConcatDataset
from ...data.memory import InMemoryDataset
from ...errors import BadData
from ...potential import Potential
from ..steps.batches import Frames, Loader, in_order, require_known
from ..steps.trainer import Properties, predict

__all__ = ["with_replay"]

_AT_ONCE = 32  # frames


def with_replay(train: Frames, file: str, potential: Potential) -> Frames:
    """The training frames, and after them those of a file, labelled by a potential.

    Args:
        train: the user's frames.
        file: structures; labels in it are not read.
        potential: with the weights and reference energies that the training starts from, on its device; its energies,
            forces, and charges where it predicts them, become the labels.

    Raises:
        FileNotFoundError, BadData: the file is missing, empty, or has structures that the potential cannot evaluate.
    """
    data = open_dataset(file, keys={})
    if not len(data):
        raise BadData(f"init.replay: {file} has no structures")
    structures = Frames(data, range(len(data)), train.cutoff, cache_bytes=0)
    try:
        require_known(potential, structures, range(len(structures)))
    except ValueError as error:
        raise BadData(f"init.replay: {error}") from None
    samples = []
    training = potential.training
    potential.eval()
    for part in in_order(len(structures), _AT_ONCE):
        for batch in Loader(structures)([part]):
            result = predict(potential, batch.to(potential.device), Properties())
            labels = {"energy": result.energy, "forces": result.forces, "charges": result.charges}
            known = {name: value.detach().cpu().double() for name, value in labels.items() if value is not None}
            together = Sample(batch.sample.system, known)
            samples += [select(together, np.array([k])) for k in range(len(part))]
    potential.train(training)
    replayed = InMemoryDataset(samples, [f"{data.name(k)} (replay)" for k in range(len(data))])
    indices = np.concatenate([train.indices, len(train.data) + np.arange(len(data))])
    return Frames(ConcatDataset([train.data, replayed]), indices, train.cutoff)
