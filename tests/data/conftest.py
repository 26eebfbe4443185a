import pytest


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """name -> the folder where a published data set looks for its original files, here for small ones."""
    # which are not the published ones
    monkeypatch.setattr("torchmdnet2.data.datasets.verify", lambda path, source, say: say(f"checked {path.name}"))

    def make(name):
        folder = tmp_path / name / "raw"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    return make
