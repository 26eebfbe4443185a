"""Small files in the layouts of published data sets: what the tests of them share."""

import io
import tarfile

import numpy as np

from torchmdnet2.data.datasets import open_published


def near(a, b):
    return np.allclose(np.asarray(a), b, rtol=1e-12, atol=0)


def opened(root, name, **options):
    """The data set from the files that are in root/name/raw; what it said."""
    said = []
    data = open_published(name, root, download=False, say=said.append, **options)
    return data, said


def put_in_tar(path, files, mode):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
