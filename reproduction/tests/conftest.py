"""The fixtures and hooks of the other tests hold here too."""

from __future__ import annotations

from tests.conftest import *  # noqa: F403
