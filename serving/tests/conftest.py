from pathlib import Path

import pytest

from harness.serving import serving, write_model


@pytest.fixture(scope="session")
def versions(tmp_path_factory) -> Path:
    """Returns SavedModels to copy: version n multiplies by n."""
    folder = tmp_path_factory.mktemp("versions")
    for version in (1, 2, 3):
        write_model(folder / str(version), float(version))
    return folder


@pytest.fixture(scope="session")
def server(versions):
    """A server of version 3, shared by all tests of a process."""
    with serving(versions, "--allow-reload-config") as running:
        running.wait_for(3)
        yield running
