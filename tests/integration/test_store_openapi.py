"""The store's own schema, and whatever a generator makes of it: no request brings the server down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from store_server import ServedStore, served

from agl.trainer.http.limits import Limits
from agl.trainer.store.http import protocol as wire
from agl.trainer.store.http.openapi import schema
from agl.trainer.wire.methods import dumps

pytest_plugins = ["schemathesis.pytest.plugin"]  # which pyproject.toml switches off for all other files
pytestmark = pytest.mark.serial  # Schemathesis gives the tests of all operations one name

SCHEMA = schemathesis.openapi.from_dict(schema(keyed=False))
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with served(tmp_path_factory.mktemp("openapi"), limits=Limits(wait_seconds=0.01)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServedStore) -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, base_url=server.url) as opened:
        yield opened


def test_every_method_is_in_the_schema(client: httpx.Client) -> None:
    told = client.get("/openapi.json").json()
    assert told == schema(keyed=False)
    assert told["openapi"] == "3.1.0"
    assert {f"{wire.PREFIX}/{name}" for name in wire.METHODS} | {wire.BATCH_PATH} == set(told["paths"])
    span = told["components"]["schemas"]["Span"]
    assert {"trace_id", "span_id", "attributes"} <= set(span["properties"])


@SCHEMA.parametrize()
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_that_the_schema_brings_about_fails(server: ServedStore, case: Any) -> None:
    answer = case.call(base_url=server.url)
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200:
        pointer = f"#/paths/{case.path.replace('/', '~1')}/post/responses/200/content/application~1json/schema"
        jsonschema.Draft202012Validator({**schema(keyed=False), "$ref": pointer}).validate(answer.json())
    else:
        assert answer.json()["error"]["message"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_brings_it_down(client: httpx.Client, data: st.DataObject) -> None:
    """Arguments of the right names and any values."""
    name = data.draw(st.sampled_from(sorted(wire.METHODS)))
    fields = list(wire.METHODS[name].arguments.model_fields)
    value = ANYTHING | st.sampled_from(["\ud800", "a\0b", 2**63, -(2**63) - 1, 1e400, ""])
    arguments = data.draw(st.fixed_dictionaries({}, optional={field: value for field in fields}))
    answer = client.post(
        f"{wire.PREFIX}/{name}", content=dumps(arguments), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 409), answer.text
