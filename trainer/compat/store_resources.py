"""The resources of `LightningStore`: named values in versions, under ids of the caller's own where it wants."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agl.agents.resources import resource_from_json, resource_to_json
from agl.trainer.compat import types as T
from agl.trainer.compat.missing import refuse
from agl.trainer.compat.store_base import OpenedStore

if TYPE_CHECKING:
    from agl.trainer.store.base import Store

_FACTS = "agl.trainer.compat"
"""Beside the named resources: their version (from 1) and when they were stored."""


class ResourceMethods(OpenedStore):
    """0.3's methods for resources."""

    def __init__(self, store: Store | str | None) -> None:
        super().__init__(store)
        self._names: dict[str, str] = {}
        self._live: dict[str, T.NamedResources] = {}

    def share_resources(self, other: ResourceMethods) -> None:
        """Know the ids and keys that `other` knows, from here on."""
        self._names, self._live = other._names, other._live

    def stored_id(self, resources_id: str) -> str:
        """The store's own id for one that the caller may have chosen."""
        return self._names.get(resources_id, resources_id)

    async def add_resources(self, resources: T.NamedResources) -> T.ResourcesUpdate:
        """A new version of the named resources; rollouts that name none get the latest."""
        latest = await self.ours.get_resources()
        version = latest[1].get(_FACTS, {}).get("version", 0) + 1 if latest else 1
        body = {name: resource_to_json(value) for name, value in resources.items()}
        body[_FACTS] = {"version": version, "created": time.time()}
        resources_id = await self.ours.update_resources(body)
        # Keys are not stored; whoever shares this object still gets them.
        self._live[resources_id] = dict(resources)
        return self._update(resources_id, resources_id, body)

    async def update_resources(self, resources_id: str, resources: T.NamedResources) -> T.ResourcesUpdate:
        """The same under an id of the caller's own, which later calls of this store may use."""
        update = await self.add_resources(resources)
        self._names[resources_id] = update.resources_id
        return dataclasses.replace(update, resources_id=resources_id)

    async def get_resources_by_id(self, resources_id: str) -> T.ResourcesUpdate | None:
        """That version, or None."""
        found = await self.ours.get_resources(self.stored_id(resources_id))
        return None if found is None else self._update(resources_id, *found)

    async def get_latest_resources(self) -> T.ResourcesUpdate | None:
        """The latest version, or None."""
        found = await self.ours.get_resources()
        return None if found is None else self._update(found[0], *found)

    def _update(self, name: str, resources_id: str, body: Mapping[str, Any]) -> T.ResourcesUpdate:
        facts = body.get(_FACTS, {})
        created = float(facts.get("created", 0.0))
        stored = {k: resource_from_json(v) for k, v in body.items() if k != _FACTS and isinstance(v, Mapping)}
        return T.ResourcesUpdate(
            resources_id=name,
            create_time=created,
            update_time=created,
            version=int(facts.get("version", 1)),
            resources={**stored, **self._live.get(resources_id, {})},
        )

    async def query_resources(self, **_: Any) -> Sequence[T.ResourcesUpdate]:
        raise refuse("query_resources", "use get_resources_by_id or get_latest_resources")
