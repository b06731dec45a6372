"""A server that the tests of a file share, with the settings in its SETTINGS; a user's session and model."""

import pytest
from anyio.from_thread import start_blocking_portal

from tests.serve.clients import OTHER_KEY, open_client
from tests.serve.servers import open_forks, open_server


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("server"), getattr(request.module, "SETTINGS", {})
    opened = open_server(folder, **settings)
    with start_blocking_portal("trio") as portal, portal.wrap_async_context_manager(opened) as client:
        yield client.url


@pytest.fixture
async def client(server):
    async with open_client(server) as client:
        yield client


@pytest.fixture
async def other(server):
    """Another user."""
    async with open_client(server, OTHER_KEY) as client:
        yield client


@pytest.fixture
async def model(client):
    return await client.create()


@pytest.fixture(scope="module")
def forks():
    with open_forks() as forks:
        yield forks
