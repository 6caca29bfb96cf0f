from tests.gateway.api.conftest import chatty, shared_chatty

__all__ = ["chatty", "shared_chatty"]
