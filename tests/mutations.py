"""Faults planted one by one in a copy of the tree: the tests that .ci/run runs must catch each.

    python tests/mutations.py                    all of them
    python tests/mutations.py --only "stale weights" "gradient dropped"
    python tests/mutations.py --list

A row says where the fault is planted and which tests must fail with it; without it they must pass. A row whose old text
does not occur exactly once in its file is an error: whoever moved the text moves the row (tests/unit/test_mutations.py
says so in the fast tier). A fault that survives is a missing test. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = (ROOT / "core" / "testing" / "conformance.py", ROOT / "core" / "testing" / "open_calls.py")
TIMEOUT = 900
"""Seconds for one row's tests; a fault that makes them hang is caught by pytest's own limit long before."""


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is broken. file: where. old, new: the text there, which occurs once, and what takes its place.
        tests: ids of tests that must fail; of several, one is enough.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def unit(file: str, *names: str) -> tuple[str, ...]:
    """Ids of tests in a file of the fast tier; without names, the file."""
    return tuple(f"tests/unit/test_{file}.py::{name}" for name in names) or (f"tests/unit/test_{file}.py",)


def api(file: str, *names: str) -> tuple[str, ...]:
    """Ids of tests of requests to the four APIs."""
    return tuple(f"tests/api/test_api_{file}.py::{name}" for name in names)


def bodies(name: str) -> tuple[str, ...]:
    """The id of a test of bodies and calls that are attacks."""
    return (f"tests/integration/test_attacks_bodies.py::test_{name}",)


def provider(name: str) -> tuple[str, ...]:
    """The id of a test of what a sandboxed agent asks of a provider."""
    return (f"tests/integration/test_attacks_provider.py::test_{name}",)


def saved(*names: str) -> tuple[str, ...]:
    """Ids of tests of what is left of a policy."""
    return tuple(f"tests/integration/test_saved_policies.py::test_{name}" for name in names)


def attacks(*names: str) -> tuple[str, ...]:
    """Ids of tests of what a policy leaves behind."""
    return tuple(f"tests/integration/test_attacks_rewards.py::test_{name}" for name in names)


_CONFORMANCE = "TestAdapters::test_"
_AWAITED = unit("adapter_conformance", f"{_CONFORMANCE}a_tool_that_waits_for_an_approval_has_not_run")
_ONE_NAME = (
    "tests/integration/test_selection_end_to_end.py::"
    "test_a_name_with_a_globs_characters_is_that_agent_and_a_name_of_nobody_ends_the_run",
)
_EQUAL_CALLS = unit("adapter_conformance", f"{_CONFORMANCE}equal_calls_of_one_answer_keep_their_results_apart")
_ANY_LAYER = saved("an_adapter_on_any_layer_is_saved_as_it_was_trained[llama-tied]")
_ENDS = saved("a_policy_learns_to_end_its_answers_with_a_token_that_was_added[tied]")
_TWO = saved("two_policies_resume_to_the_bit_and_are_saved_each[all-linear-0]")
_TWO_STALE = saved("two_policies_resume_to_the_bit_and_are_saved_each[all-linear-1]")
_FOR_VLLM = saved("vllm_gets_all_weights_of_an_adapter_that_changes_embeddings[tied]")

MUTATIONS = (
    # -- schemas, templates and files of strangers --------------------------------------------------------------------
    Mutation(
        "a schema that takes minutes is compiled where policies are sampled",
        "trainer/local/grammar.py",
        "            self._check.prove(grammar, self._lark)\n",
        "",
        ("tests/integration/test_attacks_schemas.py::test_a_tool_whose_schema_takes_too_much_is_named",),
    ),
    Mutation(
        "a slow mask holds all rows",
        "trainer/local/grammar.py",
        "                answer.pending = answer.pending or _mask_threads().submit(self._alone, answer)\n",
        "                answer.compute(bits_NW, i)\n                continue\n",
        ("tests/integration/test_attacks_schemas.py::test_a_row_whose_mask_takes_long_waits_and_the_others_do_not",),
    ),
    Mutation(
        "a row that waits for its mask loses its place",
        "trainer/local/engine/engine.py",
        "                row.cached -= 1\n",
        "",
        ("tests/integration/test_attacks_schemas.py::test_a_row_whose_mask_takes_long_waits_and_the_others_do_not",),
    ),
    Mutation(
        "a limit of a schema in mid-answer is the engine's failure",
        "trainer/local/engine/engine.py",
        '    return ConfigError(\n        f"the answer could not be held to its schema',
        '    return EngineError(\n        f"the answer could not be held to its schema',
        ("tests/integration/test_attacks_schemas.py::test_a_limit_in_mid_answer_is_the_schemas_fault",),
    ),
    Mutation(
        "a list where a schema has names is read",
        "trainer/local/lark.py",
        "            _require_readable(schema, form)\n",
        "            pass\n",
        unit("gateway_mutations", "test_what_was_found_before_is_refused"),
    ),
    Mutation(
        "a part's type that is no text is looked up",
        "core/messages/write.py",
        'if str(value.get("type") or next(iter(value), None)) not in _HIDDEN]',
        'if (value.get("type") or next(iter(value), None)) not in _HIDDEN]',
        unit("gateway_mutations", "test_what_was_found_before_is_refused"),
    ),
    Mutation(
        "a connection is closed unannounced after the server's error",
        "trainer/http/limits.py",
        "            if not exchange.ended:\n                raise\n",
        "            raise\n",
        unit("http_failures", "test_a_connection_is_kept_after_the_servers_error"),
    ),
    Mutation(
        "a number of thousands of digits is read",
        "trainer/http/numbers.py",
        '_DIGITS = "[0-9]{1,18}"',
        '_DIGITS = "[0-9]+"',
        unit("http_failures", "test_a_number_of_thousands_of_digits_is_no_error_of_the_servers"),
    ),
    Mutation(
        "another program's database is opened for writing first",
        "trainer/store/sql/sqlite.py",
        "            self._require_ours()\n",
        "",
        ("tests/integration/test_store_sql.py::test_somebody_elses_database_is_refused_and_left_alone",),
    ),
    Mutation(
        "a planted trigger is a store's",
        "trainer/store/sql/sqlite.py",
        '_names(connection, "view", "trigger")',
        '_names(connection, "nothing")',
        ("tests/integration/test_store_sql.py::test_a_store_with_what_computes_without_end_is_refused",),
    ),
    Mutation(
        "a template is loaded without its guards",
        "trainer/rendering/template_limits.py",
        "tree = _Guards().visit(environment.parse(source))",
        "tree = environment.parse(source)",
        unit("template_limits", "test_what_is_constant_is_not_computed_beyond_the_limits[repeated]"),
    ),
    Mutation(
        "an ordinary template counts as endless",
        "trainer/rendering/template_limits.py",
        "        if lines > LINES:\n",
        "        if lines > LINES / 5000:\n",
        unit(
            "template_limits",
            "test_usual_templates_take_a_small_part_of_the_limits",
            "test_a_template_that_does_not_end_is_refused_when_it_is_loaded",
        ),
    ),
    Mutation(
        "a path that is no text ends in a traceback",
        "trainer/run/hub.py",
        ', encoding="utf-8", errors="surrogateescape")',
        ', encoding="utf-8")',
        unit("odd_paths", "test_the_command_of_a_run_may_name_any_path"),
    ),
    # -- calls that are open: streams, cancellation, what is left behind ----------------------------------------------
    Mutation(
        "a request climbs over an agent to a call that is open",
        "core/tracing/context.py",
        "_ACTORS = (semconv.CHAT, semconv.EXECUTE_TOOL, semconv.INVOKE_AGENT)",
        "_ACTORS = (semconv.CHAT,)",
        unit("tracing", "test_a_request_belongs_to_the_call_in_which_it_is_made"),
    ),
    Mutation(
        "who reads a stream is within its call",
        "core/tracing/sdk_hooks.py",
        "                context.restore(self.outside)\n",
        "                pass\n",
        unit("adapter_conformance", "TestAdapters::test_a_call_inside_an_open_stream_is_its_callers[openai-pieces]"),
    ),
    Mutation(
        "who reads LangChain's stream is within its agent",
        "adapters/langchain/reading.py",
        "return pieces() if tracing.idle() else traced_sync(_no_scope, pieces, _nothing)",
        "return pieces()",
        unit("adapter_conformance", "TestAdapters::test_a_call_inside_an_open_stream_is_its_callers[langchain-pieces]"),
    ),
    Mutation(
        "who runs Pydantic AI step by step is within its agent",
        "adapters/pydantic_ai/tracer.py",
        "            with Aside():\n                scope = agent_turn(",
        "            if True:\n                scope = agent_turn(",
        unit(
            "adapter_conformance", "TestAdapters::test_a_call_inside_an_open_stream_is_its_callers[pydantic_ai-nodes]"
        ),
    ),
    Mutation(
        "a call of LangChain's that is cancelled stays open",
        "adapters/langchain/reading.py",
        "                end(run_id, error)\n",
        "                pass\n",
        ("tests/integration/test_langchain.py::test_a_call_outside_any_agent_ends_when_it_is_cancelled",),
    ),
    Mutation(
        "a stream of Agent Framework's that is dropped stays open",
        "adapters/agent_framework/tracer.py",
        "    weakref.finalize(stream, end).atexit = False\n",
        "",
        unit(
            "adapter_conformance",
            "TestAdapters::test_a_stream_that_is_left_leaves_nothing_open[agent_framework-apieces]",
        ),
    ),
    Mutation(
        "a connection keeps the texts of the call that opened it",
        "core/tracing/context.py",
        "    scope.span = _ended_span()(span)\n",
        "",
        unit(
            "adapter_conformance", "TestAdapters::test_a_stream_that_is_left_leaves_nothing_open[google_genai-apieces]"
        ),
    ),
    # -- traces: what a call's span says ------------------------------------------------------------------------------
    Mutation(
        "parallel calls that share an index are joined",
        "core/tracing/streamed_answers.py",
        """        return piece["id"] != call["id"]
""",
        """        return False
""",
        unit("streamed_answers", "test_a_stream_is_recorded_like_the_answer_that_it_streams"),
    ),
    Mutation(
        "a stream's refusal is lost",
        "core/tracing/streamed_answers.py",
        """            elif isinstance(value, str) and name != "role":
""",
        """            elif isinstance(value, str) and name not in ("role", "refusal"):
""",
        unit("streamed_answers", "test_a_stream_is_recorded_like_the_answer_that_it_streams"),
    ),
    Mutation(
        "a Responses stream that is left has no answer",
        "core/tracing/streamed_answers.py",
        """        return kind in _DELTAS or kind in _PARTS or kind in _ITEMS
""",
        """        return False
""",
        unit("call_facts", "test_the_sdk_s_streams_are_recorded_like_unstreamed_answers"),
    ),
    Mutation(
        "a LangChain stream that is left has no answer",
        "adapters/langchain/tracer.py",
        "error, attributes=facts)\n\n        def on_tool_start",
        "error)\n\n        def on_tool_start",
        unit("call_facts", "test_what_a_langchain_stream_had_said_when_it_was_left"),
    ),
    Mutation(
        "an answer that is retrieved later is lost",
        "core/tracing/background.py",
        """            return self.finished(self.scope, result)
""",
        """            return result
""",
        unit("call_facts", "test_an_answer_that_is_retrieved_later_is_the_call_s"),
    ),
    Mutation(
        "options of extra_body are not recorded",
        "core/tracing/sdk_hooks.py",
        "settings({**body, **more} if isinstance(more, Mapping) else body, self.path)",
        "settings(body, self.path)",
        unit("call_facts", "test_a_request_can_be_sent_again_as_it_was"),
    ),
    Mutation(
        "cached input counts in full",
        "trainer/report/prices.py",
        """    "cache_read_tokens": semconv.CACHE_READ_TOKENS,
""",
        "",
        unit("prices", "test_cached_input_and_reasoning_cost_what_they_cost"),
    ),
    Mutation(
        "a stream's last nulls take its numbers back",
        "core/tracing/provider_formats.py",
        "{name: value for name, value in usage.items() if value is not None}",
        "usage",
        unit("call_facts", "test_nulls_in_a_stream_s_last_usage_take_nothing_back"),
    ),
    Mutation(
        "usage in a choice is not seen",
        "core/tracing/usage.py",
        """usage_fields(choices[-1]).get("usage") if""",
        "None if",
        unit("call_facts", "test_usage_is_found_where_servers_stream_it"),
    ),
    Mutation(
        "a spoken answer costs what a written one does",
        "trainer/report/prices.py",
        """    "output_audio_tokens": semconv.AUDIO_OUTPUT_TOKENS,
""",
        "",
        unit("prices", "test_cached_input_and_reasoning_cost_what_they_cost"),
    ),
    Mutation(
        "a call's arguments in pieces are several calls",
        "core/tracing/streamed_answers.py",
        "        return call is not part\n",
        "        return False\n",
        unit("streamed_answers", "test_arguments_of_a_call_of_gemini_that_come_in_pieces"),
    ),
    Mutation(
        "thoughts of Gemini are not paid for",
        "core/tracing/usage.py",
        """    reasoning = counts.get("thoughtsTokenCount")
""",
        """    reasoning = None
""",
        unit("prices", "test_cached_input_and_reasoning_cost_what_they_cost"),
    ),
    Mutation(
        "a framework's numbers of tokens replace the provider's",
        "adapters/scopes.py",
        """    if scope.wire_calls == 1 and semconv.INPUT_TOKENS in scope.span.attributes:
""",
        """    if scope.wire_calls == -1:
""",
        unit("call_facts", "test_the_provider_s_numbers_of_tokens_count"),
    ),
    Mutation(
        "a name of the conventions is misspelt",
        "core/semconv.py",
        '"gen_ai.usage.cache_read.input_tokens"',
        '"gen_ai.usage.cached.input_tokens"',
        unit("semconv", "test_every_gen_ai_name_is_one_of_the_conventions"),
    ),
    Mutation(
        "calls over a WebSocket are no spans",
        "core/tracing/websocket_hooks.py",
        '("/responses", "/realtime")',
        '("/realtime",)',
        unit("websocket_hooks", "test_a_selected_agent_with_a_routed_call_and_one_over_a_websocket_does_not_train"),
    ),
    Mutation(
        "calls over a WebSocket of another library are no spans",
        "core/tracing/websocket_hooks.py",
        '    "websocket._core": (',
        '    "websocket._none": (',
        unit("websocket_hooks", "test_a_call_is_a_chat_span_with_its_answer"),
    ),
    Mutation(
        "a WebSocket that is left in mid-answer leaves its call open",
        "core/tracing/websocket_hooks.py",
        "        weakref.finalize(connection, known.end).atexit = False\n",
        "",
        unit("websocket_hooks", "test_a_connection_that_is_left_in_mid_answer_leaves_nothing_open"),
    ),
    Mutation(
        "the issuers of all tool calls of a rollout are kept",
        "adapters/langchain/tracer.py",
        "list(issued)[:-_MOST_ISSUERS]",
        "list(issued)[:0]",
        ("tests/integration/test_langgraph.py::test_an_endless_rollout_knows_the_issuers_of_the_last_tool_calls",),
    ),
    Mutation(
        "a cloud's client is not seen",
        "core/tracing/http_hooks.py",
        """    if (found := _IN_PATH.search(path)) is not None:
""",
        """    if (found := _IN_PATH.search(path)) is None and False:
""",
        unit("http_hooks", "test_a_call_of_a_cloud_s_client_is_one_chat_span"),
    ),
    Mutation(
        "a tool's description is not recorded",
        "adapters/scopes.py",
        "offered_tools.description(parent.rollout, agent or parent.agent, name)}",
        "None}",
        unit("semconv", "test_spans_of_agents_and_tools_have_what_the_framework_says_of_them"),
    ),
    Mutation(
        "agl run sends the key of a .env file elsewhere",
        "trainer/runners/recording_proxy.py",
        "if name in dotenv and not environment.get(name)]",
        "if False]",
        (
            "tests/integration/test_run_azure.py::test_an_address_in_a_file_of_the_program_s_is_left_alone",
            "tests/integration/test_run_azure.py::test_a_key_in_a_dotenv_file_goes_where_that_file_says",
        ),
    ),
    Mutation(
        "a call that a person refuses later has succeeded",
        "adapters/failed_calls.py",
        " if not s.attributes.get(semconv.PAUSED))\n",
        ")\n",
        _AWAITED,
    ),
    Mutation(
        "a call of the Agents SDK that a person refuses has succeeded",
        "adapters/openai_agents/tracer.py",
        '(turn_resolution, "function_rejection_item", spans.rejected)',
        '(turn_resolution, "function_rejection_item", lambda original: original)',
        _AWAITED,
    ),
    Mutation(
        "a tool of Strands that asks a person has run",
        "adapters/strands/tracer.py",
        "and failure is None) or interrupts:",
        "and failure is None):",
        ("tests/integration/test_strands.py::test_a_question_to_a_human_is_no_error",),
    ),
    Mutation(
        "a tool that takes too long has succeeded",
        "adapters/openai_agents/tracer.py",
        "                opened.reported = error\n\n        return made\n",
        "                pass\n\n        return made\n",
        ("tests/unit/test_adapter_conformance.py::TestAdapters::test_a_tool_that_takes_too_long_is_an_error",),
    ),
    Mutation(
        "a tool's description is another agent's",
        "core/tracing/offered_tools.py",
        "    offers = [rollout.offered.get(agent), *others]\n",
        "    offers = [*others, rollout.offered.get(agent)]\n",
        unit("offered_tools"),
    ),
    Mutation(
        "an inferred tool has no description",
        "core/tracing/inferred.py",
        "= recorded_description(chat, call.name)",
        "= None",
        unit("offered_tools"),
    ),
    Mutation(
        "calls over gRPC are no spans",
        "core/tracing/grpc_hooks.py",
        "/(?:Stream|Bidi)?GenerateContent$",
        "/(?:Stream|Bidi)?GenerateNothing$",
        unit("grpc_hooks", "test_a_selected_agent_with_a_routed_call_and_one_over_grpc_does_not_train"),
    ),
    Mutation(
        "a stream over gRPC that is dropped is kept alive",
        "core/tracing/grpc_hooks.py",
        "        _when_done(pending, scope)\n        return pending\n",
        "        pending.add_done_callback(lambda call: _end(scope, lambda: call))\n        return pending\n",
        unit("grpc_hooks", "test_a_stream_that_is_dropped_is_cancelled_as_without_agl"),
    ),
    Mutation(
        "calls of a rarer library for WebSockets are no spans",
        "core/tracing/websocket_hooks.py",
        '    "simple_websocket.aiows": (',
        '    "simple_websocket.none": (',
        unit("websocket_hooks", "test_a_call_is_a_chat_span_with_its_answer"),
    ),
    # -- rows: what is trained ----------------------------------------------------------------------------------------
    Mutation(
        "the learner forgets what an answer was held to",
        "trainer/local/learner/logprobs.py",
        "logits_NV.masked_fill_(hidden(bits_NW",
        "logits_NV.masked_fill(hidden(bits_NW",
        unit("grammar", "test_an_update_leaves_what_could_not_come_alone"),
    ),
    Mutation(
        "a grammar does not see the token that was drawn",
        "trainer/local/grammar.py",
        "                    matcher.consume_token(int(row.token_ids[t]))\n",
        "",
        unit("grammar", "test_the_learner_gives_the_logprobs_that_the_engine_gave"),
    ),
    Mutation(
        "a call is held to the id of a placeholder",
        "trainer/local/lark.py",
        'patterns = {CALL_ID: "/[a-zA-Z0-9]{9}/", ',
        "patterns = {",
        unit("grammar", "test_calls_in_other_forms_than_tagged_json", "test_a_call_has_an_id_that_the_policy_writes"),
    ),
    Mutation(
        "mask shifted by a token",
        "core/mdp/sequence.py",
        "sampled_N = np.arange(n) >= n_prompt\n",
        "sampled_N = np.arange(n) >= n_prompt + 1\n",
        unit("sequence", "test_each_sampled_token_of_a_trainable_call_is_trained_once_with_its_own_numbers"),
    ),
    Mutation(
        "cancelled answers trained",
        "core/mdp/sequence.py",
        "mask_N = sampled_N & transition.trainable\n",
        "mask_N = sampled_N\n",
        unit("sequence", "test_a_cancelled_answer_is_context_for_the_next_call_but_not_trained"),
    ),
    Mutation(
        "merged rows trained twice",
        "core/mdp/sequence.py",
        "    return [row.build(trajectory) for row in rows]\n",
        "    return [row.build(trajectory) for row in rows for _ in range(2)]\n",
        unit("sequence", "test_each_sampled_token_of_a_trainable_call_is_trained_once_with_its_own_numbers"),
    ),
    Mutation(
        "a call joins a row that it does not share its prompt with",
        "core/mdp/sequence.py",
        "different_R = segment.buffer[offset : offset + room] != tokens_N[n : n + room]\n",
        "different_R = segment.buffer[offset : offset + room] > tokens_N[n : n + room]\n",
        unit("sequence", "test_walking_up_from_a_call_spells_its_prompt_and_response"),
    ),
    # -- surroundings, order, lost answers ----------------------------------------------------------------------------
    Mutation(
        "user code runs in an empty context",
        "core/surroundings.py",
        "target=copied().run, args=(function,), name=name",
        "target=function, name=name",
        unit("surroundings", "test_user_code_sees_what_its_program_has_set_up"),
    ),
    Mutation(
        "rollouts change the settings of decimal for each other",
        "core/surroundings.py",
        "decimal.setcontext(decimal.getcontext().copy())",
        "decimal.getcontext()",
        unit("surroundings", "test_what_a_rollout_sets_no_other_one_sees"),
    ),
    Mutation(
        "async agents share the context of their loop",
        "trainer/http/aio.py",
        "return copied().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)",
        "return asyncio.run_coroutine_threadsafe(coroutine, self._loop)",
        unit("surroundings", "test_a_thread_and_a_task_on_another_loop_begin_in_a_copy"),
    ),
    Mutation(
        "spans ordered by the wall clock",
        "core/mdp/order.py",
        "return places[span.span_id], 0, span.start, span.span_id",
        "return 0, 0, span.start, span.span_id",
        unit("order", "test_the_last_answer_is_graded_though_the_clock_was_set_back"),
    ),
    Mutation(
        "spans without numbers come before all calls",
        "core/mdp/order.py",
        "max(after, bisect.bisect_left(latest, start) - 1)",
        "after",
        unit("order", "test_spans_without_a_number_lie_among_the_others_by_their_own_clock"),
    ),
    Mutation(
        "a sender's wrong clock leads out of the span around it",
        "core/mdp/order.py",
        "start = min(max(start, ancestor.start), ancestor.end)",
        "pass",
        unit("order", "test_spans_without_a_number_stay_within_an_ancestor_that_has_one"),
    ),
    Mutation(
        "a thread takes over which event loop runs",
        "core/surroundings.py",
        "context.run(sniffio.current_async_library_cvar.set, None)",
        "pass",
        unit("surroundings", "test_which_loop_runs_is_no_part_of_them"),
    ),
    Mutation(
        "a group reward's refused signal is a reward of 0",
        "trainer/run/group_reward.py",
        'main_thread.require_none_refused(f"group_reward={reward.label}", **where)',
        "pass",
        unit("main_thread", "test_a_group_reward_is_named_too"),
    ),
    Mutation(
        "a rollout's thread has no event loop to get",
        "core/tracing/main_thread.py",
        "if context.current() is None or threading.current_thread() is threading.main_thread():",
        "if True:",
        unit("main_thread", "test_a_threads_loop_is_closed_with_it_and_outside_a_rollout_there_is_none"),
    ),
    Mutation(
        "a future loses a StopIteration, and its waiter waits",
        "core/errors.py",
        "if not isinstance(error, StopIteration):",
        "if True:",
        unit("failures", "test_whatever_user_code_raises_ends_its_own_attempt"),
    ),
    Mutation(
        "sys.exit of user code ends its event loop",
        "core/errors.py",
        "elif threading.current_thread() is threading.main_thread() or _task_is_cancelled():",
        "else:",
        unit("failures", "test_whatever_user_code_raises_ends_its_own_attempt"),
    ),
    Mutation(
        "an empty body of a tool server is the policy's empty answer",
        "core/mdp/evidence.py",
        "    if calls and not any(isinstance(text, str) and text.strip() for text in texts):\n        texts = []\n",
        "",
        unit("policy_faults", "test_an_empty_text_is_an_answer_only_where_there_is_no_other"),
    ),
    Mutation(
        "groups of exceptions are alike whatever is in them",
        "core/errors.py",
        "if isinstance(error, BaseExceptionGroup):",
        "if False:",
        unit("failures", "test_a_group_of_exceptions_is_told_by_its_members"),
    ),
    Mutation(
        "a group reward's exception does not say whose it is",
        "trainer/run/group_reward.py",
        "                if isinstance(error, AglError):\n                    raise\n",
        "                raise\n",
        unit("failures", "test_a_group_reward_that_raises_is_named_with_its_group"),
    ),
    Mutation(
        "a file name of the policy's is the grader's mistake",
        "core/rewards/files.py",
        "except (OSError, ValueError):",
        "except OSError:",
        unit("read_text", "test_a_name_that_a_policy_made_up_is_the_default"),
    ),
    Mutation(
        "a byte order mark is a part of the text",
        "core/rewards/files.py",
        '"utf-8-sig"',
        '"utf-8"',
        unit("read_text", "test_editors_of_other_systems_change_nothing"),
    ),
    Mutation(
        "durations by the wall clock",
        "core/tracing/open_span.py",
        "self._epoch + time.monotonic_ns()",
        "time.time_ns()",
        unit("order", "test_a_span_in_which_the_clock_is_set_lasts_as_long_as_it_lasts"),
    ),
    Mutation(
        "a call without a span is put after all others",
        "core/mdp/order.py",
        "number = max(after - _STEP, (before + after) // 2)",
        "number = max(known.values()) + _STEP",
        unit("order", "test_calls_without_spans_lie_among_those_that_have_one"),
    ),
    Mutation(
        "the label of the latest clock counts",
        "trainer/report/labels.py",
        "attributes[semconv.SEQUENCE] = number_after(known)",
        "attributes[semconv.SEQUENCE] = 0",
        unit("order", "test_the_newest_label_counts_though_the_clock_was_set_back"),
    ),
    Mutation(
        "answers that nobody received are trained",
        "core/mdp/lost_answers.py",
        "if call.span_id in received and _response_id(call) not in received[call.span_id]",
        "if call.span_id in ()",
        unit(
            "lost_answers",
            "test_a_span_names_what_arrived",
            "test_a_run_marks_in_its_store_what_its_agent_did_not_read",
        ),
    ),
    Mutation(
        "a stream that its reader drops counts as received",
        "adapters/streams.py",
        "        arrivals.left(scope)\n",
        "",
        unit("lost_answers", "test_a_run_marks_in_its_store_what_its_agent_did_not_read"),
    ),
    Mutation(
        "a stream that broke off counts as received",
        "core/tracing/arrivals.py",
        "        if not self._progress.whole:\n            self._lost()",
        "        pass",
        unit("lost_answers", "test_a_run_marks_in_its_store_what_its_agent_did_not_read"),
    ),
    Mutation(
        "an answer that another call continues counts as lost",
        "core/mdp/lost_answers.py",
        "earlier = [call for call in earlier if call.id not in continued]",
        "pass",
        unit("lost_answers", "test_a_retry_says_nothing_of_other_requests"),
    ),
    Mutation(
        "a retry hides an answer to another request",
        "core/mdp/lost_answers.py",
        'and call.request.get("asked") == again.request.get("asked")',
        "and True",
        unit("lost_answers", "test_a_retry_says_nothing_of_other_requests"),
    ),
    Mutation(
        "a request that was sent again is sampled to its end",
        "trainer/gateway/gateway.py",
        "if pending.replaces(other):",
        "if pending is None:",
        unit("lost_answers", "test_a_request_that_is_sent_again_is_not_sampled_to_its_end"),
    ),
    Mutation(
        "lost answers are not marked in the store",
        "trainer/store/sql/records.py",
        "    statements.change_many(connection, _MARK_CALL, lost)\n",
        "",
        unit("lost_answers", "test_a_run_marks_in_its_store_what_its_agent_did_not_read"),
    ),
    # -- credit and advantages ----------------------------------------------------------------------------------------
    Mutation(
        "credit to the wrong call",
        "core/mdp/builder.py",
        "call = index.rewarded_call(span.parent_id)\n",
        "call = next(iter(sampled.values()), None)\n",
        unit("trajectories", "test_a_reward_goes_to_the_call_that_earned_it"),
    ),
    Mutation(
        "failed calls are transitions",
        "core/mdp/builder.py",
        "{c.id: c for c in index.calls if c.policy is not None and c.error is None}",
        "{c.id: c for c in index.calls if c.policy is not None}",
        unit("trajectories", "test_a_failed_call_is_no_transition_but_is_counted"),
    ),
    Mutation(
        "a tool's time counted again for the model that it asks",
        "core/mdp/span_index.py",
        "for s in spans if s.operation == semconv.EXECUTE_TOOL)]) - models\n",
        "for s in spans if s.operation == semconv.EXECUTE_TOOL)])\n",
        unit("trajectories", "test_every_second_of_an_attempt_went_somewhere_once"),
    ),
    Mutation(
        "an attempt takes every row of the engine",
        "trainer/gateway/gateway.py",
        "        async with access.answers:\n",
        "        if True:\n",
        unit(
            "gateway_requests", "test_an_attempt_that_wants_many_answers_has_64_sampled_at_a_time_and_holds_nobody_up"
        ),
    ),
    Mutation(
        "later rewards are not discounted",
        "core/credit.py",
        "later = self.gamma * next_return[policy]\n",
        "later = next_return[policy]\n",
        unit("credit", "test_discounted_is_the_bellman_equation_within_each_policy"),
    ),
    Mutation(
        "a game's opponents' rewards not subtracted",
        "core/credit.py",
        "r - (total - r) / (len(players) - 1)",
        "r",
        unit("credit", "test_a_game_is_zero_sum_between_its_players"),
    ),
    Mutation(
        "rewards of two rollouts swapped",
        "trainer/objectives/advantages.py",
        "            for level in [credit_levels[i][n]]\n",
        "            for level in [credit_levels[i ^ 1 if i ^ 1 < len(trajectories) else i][n]]\n",
        unit("advantages", "test_one_call_per_rollout_is_the_published_formula"),
    ),
    Mutation(
        "sign of the advantage",
        "trainer/objectives/advantages.py",
        "centred = np.asarray(values, dtype=np.float64) - mean\n",
        "centred = mean - np.asarray(values, dtype=np.float64)\n",
        unit("objectives", "TestAdvantages::test_a_group_is_centred_and_scaled_by_its_sample_deviation"),
    ),
    Mutation(
        "advantage not normalised",
        "trainer/objectives/advantages.py",
        "normalize_std=normalize_std and deviation > 0)",
        "normalize_std=False)",
        unit("advantages", "test_one_call_per_rollout_is_the_published_formula"),
    ),
    Mutation(
        "group statistics count calls instead of rollouts",
        "trainer/objectives/advantages.py",
        "cells[entry.key, entry.rollout].append(entry)",
        "cells[entry.key, len(cells)].append(entry)",
        unit("advantages", "test_a_rollout_counts_once_however_many_calls_it_made"),
    ),
    Mutation(
        "groups of other tasks in the statistics",
        "trainer/objectives/advantages.py",
        "else (t.group, x.call.policy, level.keys[k]),",
        "else (x.call.policy, level.keys[k]),",
        unit("advantages", "test_a_group_is_a_world_of_its_own"),
    ),
    # -- objectives and learner ---------------------------------------------------------------------------------------
    Mutation(
        "clip without effect",
        "trainer/objectives/losses.py",
        "    return torch.maximum(plain_N, limited_N), limited_N > plain_N\n",
        "    return plain_N, limited_N > plain_N\n",
        unit("objectives", "TestPolicyLoss::test_a_ratio_past_the_clip_gets_no_gradient_where_the_advantage_pushed_it"),
    ),
    Mutation(
        "every answer counts the same under token-mean",
        "trainer/objectives/reduction.py",
        "weights_T[mask_T] = 1 / max(n_tokens, 1)\n",
        "weights_T[mask_T] = 1 / (n_calls * length_C[sequence.calls[mask_T]])\n",
        unit("objectives"),
    ),
    Mutation(
        "k3 without its linear term",
        "trainer/objectives/kl.py",
        "r_N.exp() - r_N - 1",
        "r_N.exp() - 1",
        unit("objectives", "TestKLAndEntropy::test_k1_and_k3_are_unbiased"),
    ),
    Mutation(
        "importance weights not truncated",
        "trainer/objectives/importance.py",
        "np.minimum(weights_N, threshold)",
        "weights_N",
        ("tests/integration/test_objectives_verl.py::test_importance_weights",),
    ),
    Mutation(
        "verl's trainers of two policies train each other's rows",
        "guests/verl/agl_verl/rows.py",
        "for trajectory in scored.of(policy):",
        "for trajectory in scored.trajectories:",
        unit("verl_policies", "test_a_policys_rows_are_those_that_it_would_have_alone"),
    ),
    Mutation(
        "verl's trainers of two policies may request different tasks",
        "guests/verl/agl_verl/barrier.py",
        "if places[other] != places[first]:",
        "if len(places[other]) != len(places[first]):",
        unit("verl_policies", "test_trainers_at_different_places_are_an_error"),
    ),
    Mutation(
        "groups dealt to GPUs row by row, so that prefixes are computed on each",
        "guests/verl/agl_verl/sharing.py",
        "for row, group in enumerate(groups):",
        "for row, group in enumerate(range(len(groups))):",
        unit("verl_sharing", "test_groups_that_fit_are_not_cut_and_tokens_are_balanced"),
    ),
    Mutation(
        "shared prefixes with a critic, which has no trees",
        "guests/verl/agl_verl/config/checks.py",
        'if plan.adv_estimator == "gae" else sharing.obstacle(plan)',
        'if plan.adv_estimator == "ppo" else sharing.obstacle(plan)',
        unit("verl_sharing", "test_it_is_refused_where_verl_would_compute_something_else"),
    ),
    Mutation(
        "the rejected side preferred",
        "trainer/objectives/losses.py",
        "margin_P = chosen_rewards_P - rejected_rewards_P\n",
        "margin_P = rejected_rewards_P - chosen_rewards_P\n",
        unit("learner", "TestPreferences::test_the_chosen_side_wins"),
    ),
    Mutation(
        "data parallel: gradients are not added",
        "trainer/local/learner/learner.py",
        "        self._ranks.add_gradients(self._trained.values())\n",
        "",
        ("tests/integration/test_data_parallel.py",),
    ),
    Mutation(
        "data parallel: each measures its step on what it computed",
        "trainer/local/learner/learner.py",
        "            before = self._ranks.union({i: logprobs_N.cpu() for i, logprobs_N in before.items()})\n",
        "",
        ("tests/integration/test_data_parallel.py",),
    ),
    Mutation(
        "data parallel: the first process samples all answers",
        "trainer/local/policy.py",
        "lambda owner: next(turns) % n",
        "lambda owner: 0",
        ("tests/integration/test_data_parallel.py",),
    ),
    Mutation(
        "gradient dropped",
        "trainer/local/learner/learner.py",
        "                loss.backward()\n",
        "                (0 * loss).backward()\n",
        unit("learner", "TestUpdate::test_a_step_makes_rewarded_tokens_likelier_and_punished_ones_less_likely"),
    ),
    Mutation(
        "log-probs computed again instead of those sampled",
        "trainer/local/learner/learner.py",
        "loss_rows = [LossRow(row, row.logprobs) for row in rows]\n",
        "loss_rows = [LossRow(r, x) for r, x in zip(rows, self.sequence_logprobs(rows), strict=True)]\n",
        unit("learner", "TestUpdate::test_the_gradient_is_that_of_the_formula_written_out"),
    ),
    Mutation(
        "resume forgets how many updates were made",
        "trainer/local/learner/learner.py",
        'self._updates = int(state["updates"])\n',
        'self._updates = int(state["updates"]) - 1\n',
        unit("learner", "TestState::test_a_resumed_run_equals_one_never_stopped_to_the_bit"),
    ),
    Mutation(
        "advantages of tokens ignore the value of what follows",
        "trainer/objectives/gae.py",
        "        next_estimate = estimates_T[t]\n",
        "        next_estimate = 0.0\n",
        unit("learner", "TestUpdate::test_a_value_head_learns_what_the_calls_of_a_state_return"),
    ),
    # -- sampling -----------------------------------------------------------------------------------------------------
    Mutation(
        "stale weights: answers go on from what the old ones computed",
        "trainer/local/engine/engine.py",
        "        self._prefixes.clear(policy)\n        self._requeue()\n",
        "",
        unit("engine", "test_a_weight_update_is_seen_by_the_next_step_even_of_a_running_request"),
    ),
    Mutation(
        "an update drops the prefixes of every policy but its own",
        "trainer/local/engine/engine.py",
        "        self._prefixes.clear(policy)\n",
        "",
        unit("prefix_cache", "test_an_update_drops_the_prefixes_of_its_own_policy_alone"),
    ),
    Mutation(
        "a row reads another policy's keys and values",
        "trainer/local/engine/forward.py",
        "if a == b else 0 for (a, b), neighbours",
        "for (_, _), neighbours",
        unit("engine", "test_rows_of_other_policies_are_not_read_together"),
    ),
    Mutation(
        "a beginning in common weighs what the rest should",
        "trainer/local/engine/attention.py",
        "torch.sigmoid(common_lse - own_lse)",
        "torch.sigmoid(own_lse - common_lse)",
        unit("engine", "test_rows_that_begin_alike_keep_their_own_logprobs"),
    ),
    # -- architectures ------------------------------------------------------------------------------------------------
    Mutation(
        "long rope has no border",
        "trainer/local/architecture.py",
        "    borders = [*_rope_borders(config), *_chunks(config)]\n",
        "    borders = [*_chunks(config)]\n",
        unit("agreement", "test_how_long_a_conversation_may_be"),
    ),
    Mutation(
        "what is proved at loading does not reach the context's end",
        "trainer/local/agreement.py",
        "_beside(model, other, 0, last) - _beside(model, other, 0)",
        "_beside(model, other, 0, 0) - _beside(model, other, 0)",
        unit("agreement", "test_a_context_beyond_the_border_of_long_rope_does_not"),
    ),
    Mutation(
        "a model with a state of the whole row is loaded",
        "trainer/local/architecture.py",
        "    if others := sorted({*_layer_kinds(config)} - ATTENTION_KINDS):\n",
        "    if others := []:\n",
        ("tests/integration/test_architectures.py::test_a_family[LFM2]",),
    ),
    Mutation(
        "a window that no row is longer than costs what one that slides does",
        "trainer/local/architecture.py",
        "    if not size or size >= context or (",
        "    if not size or (",
        unit("engine", "test_rows_of_different_length_do_not_change_each_other[mistral]"),
    ),
    Mutation(
        "a GGUF file's queries keep their order of rows",
        "trainer/local/gguf_export.py",
        "    if family.pairs and kind in heads:\n",
        "    if family.pairs and kind == 'attn_k':\n",
        ("tests/unit/test_gguf_export.py::test_what_is_read_computes_what_was_written[Llama 3.1]",),
    ),
    Mutation(
        "a configuration that a GGUF file cannot hold is written",
        "trainer/local/gguf_families.py",
        '    if others:\n        raise refused(f"a {family.architecture} file',
        '    if not others:\n        raise refused(f"a {family.architecture} file',
        ("tests/unit/test_gguf_export.py::test_a_model_that_llama_cpp_computes_otherwise_is_refused",),
    ),
    Mutation(
        "a sliding window is left out of a GGUF file",
        "trainer/local/gguf_families.py",
        "    if not family.windows and any(_windows(config)):\n",
        "    if False:\n",
        ("tests/unit/test_gguf_export.py::test_a_model_that_llama_cpp_computes_otherwise_is_refused",),
    ),
    Mutation(
        "a tokenizer is exported under a pre-tokenizer that merges whole words otherwise",
        "trainer/local/gguf_tokenizer.py",
        "        if known.exact and (known.cuts, known.whole_words) == (cuts, whole_words):\n",
        "        if known.exact and known.cuts == cuts:\n",
        (
            "tests/unit/test_gguf_export.py::test_a_tokenizer_that_llama_cpp_lacks_is_refused",
            "tests/unit/test_gguf_export.py::test_a_tokenizer_is_written_by_what_it_cuts",
        ),
    ),
    Mutation(
        "a GGUF file replaces another before it is whole",
        "trainer/local/gguf_export.py",
        "    partial = file.with_name(",
        "    partial = file if file.exists() else file.with_name(",
        ("tests/unit/test_gguf_export.py::test_a_file_is_replaced_whole_or_not_at_all",),
    ),
    Mutation(
        "numbers beyond float16 become infinite in a GGUF file",
        "trainer/local/gguf_export.py",
        "    if not largest <= limit:\n",
        "    if False:\n",
        ("tests/unit/test_gguf_export.py::test_numbers_beyond_float16_are_refused",),
    ),
    Mutation(
        "the quickstart's policy has a pre-tokenizer of its own",
        "trainer/quickstart/run.py",
        ", words=QWEN2, **own",
        ", **own",
        ("tests/unit/test_gguf_export.py::test_the_quickstart_makes_a_policy_that_llama_cpp_has",),
    ),
    Mutation(
        "a GGUF file's rope factor without a kind is dropped",
        "trainer/local/gguf_config.py",
        '("linear" if has_factor else "none")',
        '"none"',
        ("tests/integration/test_gguf.py::test_a_factor_without_a_kind_is_linear",),
    ),
    Mutation(
        "Gemma's attention from GGUF is scaled by transformers' default",
        "trainer/local/gguf_config.py",
        "        config.query_pre_attn_scalar = heads if of_all_heads else head_size(config)\n",
        "        pass\n",
        ("tests/integration/test_gguf.py::test_it_is_its_source_at_every_position[Gemma 2]",),
    ),
    Mutation(
        "half a surrogate pair in arguments reaches clients",
        "trainer/rendering/toolparsers.py",
        'text.encode(errors="replace").decode()',
        "text",
        unit("call_arguments"),
    ),
    Mutation(
        "a sliding window does not slide while answers are sampled",
        "trainer/local/engine/forward.py",
        "        if self._window is None:\n            return mask\n",
        "        if self._window is None or self._window:\n            return mask\n",
        unit("engine", "test_a_sliding_window_is_that_of_a_full_forward_pass"),
    ),
    Mutation(
        "a sliding window does not slide over a row that branches",
        "trainer/local/learner/microbatches.py",
        "        if window is not None and mask.dim() == 4:\n",
        "        if False:\n",
        unit("agreement", "test_a_model_that_is_exact_passes"),
    ),
    Mutation(
        "the learner waits for a base model that the model does not call",
        "trainer/local/architecture.py",
        '    return getattr(found, "decoder", found)\n',
        "    return found\n",
        ("tests/integration/test_architectures.py::test_a_family[OPT]",),
    ),
    Mutation(
        "keys in parts reach a model that looks at them",
        "trainer/local/engine/attention.py",
        "        ours = [logits(GROUPED), logits(GROUPED, _CacheInParts(mask))]\n",
        "        ours = [logits(GROUPED)]\n",
        unit("engine", "test_attention_is_replaced_only_where_the_logits_stay"),
    ),
    Mutation(
        "rope scaling of a GGUF file is dropped",
        "trainer/local/gguf_config.py",
        "    _set_rope(reader, config, value, file)\n",
        "",
        ("tests/integration/test_gguf.py::test_it_is_its_source_at_every_position[Llama 3.1]",),
    ),
    Mutation(
        "a key of a GGUF file that nobody reads is passed over",
        "trainer/local/gguf_config.py",
        "    unknown = sorted(_unknown_keys(reader, architecture, value))\n",
        "    unknown = []\n",
        ("tests/integration/test_gguf.py::test_what_is_not_understood_is_refused",),
    ),
    Mutation(
        "a tensor of a GGUF file that the model has no place for is passed over",
        "trainer/local/gguf_config.py",
        "    if others:\n",
        "    if False:\n",
        ("tests/integration/test_gguf.py::test_what_is_not_understood_is_refused",),
    ),
    Mutation(
        "a GGUF file's scale of attention is passed over",
        "trainer/local/gguf_config.py",
        '    if gain != 1.0 and kind != "yarn":\n',
        "    if False:\n",
        ("tests/integration/test_gguf.py::test_what_is_not_understood_is_refused",),
    ),
    Mutation(
        "keys of two sizes are found out after the model is loaded",
        "trainer/local/architecture.py",
        "    if sliding and full and sliding != full:\n",
        "    if False:\n",
        ("tests/integration/test_architectures.py::test_a_family[Gemma 4]",),
    ),
    Mutation(
        "ALiBi is found out after the model is loaded",
        "trainer/local/architecture.py",
        '    if getattr(config, "alibi", False):\n',
        "    if False:\n",
        ("tests/integration/test_architectures.py::test_a_family[Falcon, ALiBi]",),
    ),
    Mutation(
        "a template that takes parts alone loses every text",
        "trainer/rendering/chat_template.py",
        "        if self._takes_parts:\n",
        "        if False:\n",
        unit("rendering", "test_a_template_that_takes_parts_alone_shows_every_text"),
    ),
    Mutation(
        "a template that shows no text is taken",
        "trainer/rendering/chat_template.py",
        "        if refused:\n            return False\n        raise ModelLoadError(\n",
        "        if True:\n            return False\n        raise ModelLoadError(\n",
        unit("rendering", "test_a_template_that_shows_no_text_of_a_user_is_refused"),
    ),
    Mutation(
        "a stop saves spreads of a step that was not trained",
        "trainer/algorithms/loop.py",
        '                beyond["spreads"] = sorted(kept.spreads.items())\n',
        '                beyond["spreads"] = sorted((source.batches.spreads or {}).items())\n',
        ("tests/integration/test_stopped_runs.py::test_tasks_drawn_by_their_spread_are_the_same_after_a_stop",),
    ),
    Mutation(
        "the chunks of Google's streamed answers are turns of their own",
        "trainer/gateway/dialects/google/body.py",
        '        if turns and content.get("role") == "model" == turns[-1].get("role"):\n',
        "        if False:\n",
        unit("google", "test_the_chunks_of_a_streamed_answer_are_one_turn"),
    ),
    Mutation(
        "a nucleus of nothing is no nucleus",
        "trainer/gateway/dialects/common.py",
        "    return 1.0 if top_p is None else max(top_p, SMALLEST_NUCLEUS)\n",
        "    return top_p or 1.0\n",
        api("parameters", "test_a_nucleus_of_nothing_is_the_most_likely_token"),
    ),
    Mutation(
        "a stored response that is wanted as a stream comes whole without a word",
        "trainer/gateway/http.py",
        '    if request.query_params.get("stream", "false") != "false":\n',
        "    if False:\n",
        unit("answer_facts", "test_a_stored_response_is_returned_until_it_is_deleted"),
    ),
    Mutation(
        "conversations are made tokens without being checked",
        "trainer/gateway/completions.py",
        "read_chat(conversation, access).chat)",
        "ChatRequest(body.messages, body.tools, None, Sampling(max_tokens=1)))",
        unit("text_completions", "test_tokens_of_texts_and_conversations_and_back"),
    ),
    Mutation(
        "the first tokens of a text are not timed",
        "trainer/gateway/completions.py",
        "            measured.first_tokens()\n",
        "",
        unit("text_completions", "test_a_text_is_continued_whole_and_as_a_stream"),
    ),
    # -- gateway ------------------------------------------------------------------------------------------------------
    Mutation(
        "wrong version of the policy recorded",
        "trainer/gateway/gateway.py",
        "policy_version=completion.policy_version,",
        "policy_version=completion.policy_version + 1,",
        unit("gateway_requests", "test_an_update_waits_for_running_requests_and_holds_new_ones"),
    ),
    Mutation(
        "answer recorded empty",
        "trainer/gateway/gateway.py",
        "response=message if self.capture_content else {},",
        "response={},",
        unit("gateway", "test_an_answer_and_its_record"),
    ),
    Mutation(
        "the temperature that was asked for recorded instead of the one used",
        "trainer/gateway/gateway.py",
        "temperature=sampling.temperature,",
        "temperature=request.sampling.temperature,",
        unit("gateway", "test_the_trainers_rules_win_and_both_are_recorded"),
    ),
    Mutation(
        "a rewritten history is continued",
        "trainer/gateway/sessions.py",
        'if any(m.get("role") == "assistant" for m in messages[n:]):',
        "if False:",
        unit("sessions", "test_a_rewritten_history_forks_with_its_cause"),
    ),
    Mutation(
        "other tools are continued",
        "trainer/gateway/sessions.py",
        "hash_of(orjson.dumps([policy, list(tools or ())], option=orjson.OPT_SORT_KEYS))",
        "hash_of(orjson.dumps([policy], option=orjson.OPT_SORT_KEYS))",
        unit("sessions", "test_other_tools_fork"),
    ),
    Mutation(
        "any key opens an attempt",
        "trainer/gateway/gateway.py",
        "if access is None or not authorized:",
        "if access is None:",
        unit("gateway_security", "test_a_key_opens_its_own_attempt_alone"),
    ),
    Mutation(
        "key of an attempt that has ended accepted",
        "trainer/gateway/gateway.py",
        "access = self._accesses.pop((rollout_id, attempt), None)\n",
        "access = self._accesses.get((rollout_id, attempt))\n",
        unit("gateway_security", "test_a_key_dies_with_its_attempt"),
    ),
    # -- what the four APIs say of an answer --------------------------------------------------------------------------
    Mutation(
        "an answer that ends within a tool call is a whole one",
        "trainer/gateway/gateway.py",
        'if finish_reason == "cancelled" or unfinished else',
        'if finish_reason == "cancelled" else',
        unit("cut_answers", "test_an_answer_that_is_cut_anywhere_says_so"),
    ),
    Mutation(
        "brackets in a text of a call's arguments count",
        "trainer/rendering/toolparsers.py",
        '_JSON_STRING.sub("", text)',
        "text",
        unit("toolparsers", "test_a_broken_call_that_has_its_end_is_finished"),
    ),
    Mutation(
        "a grammar allows a thought that the parser does not read",
        "trainer/rendering/rendering.py",
        ' if self._model.thinks else "none"',
        "",
        unit("held_answers", "test_an_answer_that_is_held_to_a_schema_is_json_of_it[no thought-True-False]"),
    ),
    Mutation(
        "a thought may spell its end in letters",
        "trainer/local/lark.py",
        r" & ~/(.|\n)*{ending}(.|\n)*/",
        "",
        unit("held_answers", "test_an_answer_that_is_held_to_a_schema_is_json_of_it[thoughts-True-False]"),
    ),
    Mutation(
        "a thought that the prompt begins is not ended where the vocabulary has no marks",
        "trainer/rendering/rendering.py",
        'return "none" if state == "possible" and not self._marked else state',
        'return state if self._marked else "none"',
        unit("held_answers", "test_an_answer_that_is_held_to_a_schema_is_json_of_it[a thought begun-False-False]"),
    ),
    Mutation(
        "cached tokens are not those that the engine reused",
        "trainer/gateway/calls.py",
        "min(reply.completion.cached_tokens for reply in replies)",
        "0",
        unit("answer_facts", "test_usage_has_what_the_engine_reused_and_what_is_reasoning"),
    ),
    Mutation(
        "cached tokens of a vLLM server are not read",
        "trainer/engines/vllm_answers.py",
        "max(part.cached for part in parts)",
        "0",
        unit("vllm_failures", "test_what_the_server_reused_of_a_prompt[True]"),
    ),
    Mutation(
        "reasoning is counted without the mark that ends it",
        "trainer/rendering/rendering.py",
        "if holds_all(size) and not read(size - 1).content:",
        "if False:",
        unit("answer_facts", "test_reasoning_is_counted_with_its_marks"),
    ),
    Mutation(
        "log-probs of text that is held back come before it",
        "trainer/gateway/dialects/content_tokens.py",
        "        if not whole:\n            return None\n",
        "",
        unit("answer_facts", "test_log_probs_come_with_the_deltas_whose_tokens_they_are[text-True]"),
    ),
    Mutation(
        "alternatives do not come with a stream's tokens",
        "trainer/gateway/gateway.py",
        "            choice.top.extend(top)\n",
        "",
        unit("answer_facts", "test_log_probs_come_with_the_deltas_whose_tokens_they_are[text-False]"),
    ),
    Mutation(
        "a streamed block of thinking has no signature",
        "trainer/gateway/dialects/messages/stream.py",
        'if self._open_block == "thinking":',
        "if False:",
        unit("answer_facts", "test_a_block_of_thinking_is_closed_by_its_signature"),
    ),
    Mutation(
        "a log-prob's token that is a part of a character has no bytes",
        "trainer/gateway/dialects/common.py",
        "spelled = rendering.token_bytes(token) or ",
        "spelled = ",
        unit("token_text", "test_the_bytes_of_log_probs_add_up_to_the_answer"),
    ),
    Mutation(
        "a call that is whole is said to be cut, and not the next",
        "trainer/gateway/dialects/responses/answer.py",
        " and reply.unfinished",
        " and False",
        unit("answer_facts", "test_the_item_that_was_cut_is_the_incomplete_one"),
    ),
    Mutation(
        "a deleted response is returned",
        "trainer/gateway/stored_responses.py",
        "        del self._responses[response_id]\n",
        "",
        unit("answer_facts", "test_a_stored_response_is_returned_until_it_is_deleted"),
    ),
    Mutation(
        "neighbouring messages of one role are refused where roles must alternate",
        "trainer/rendering/normalise.py",
        "            if len(alternating := joined(messages)) < len(messages):\n",
        "            if len(alternating := joined(messages)) < 0:\n",
        api("neighbours", "test_neighbours_are_answered_and_continued[mistral_v3]"),
    ),
    Mutation(
        "neighbouring messages are joined where the template takes them",
        "trainer/rendering/normalise.py",
        "    try:\n        return render(messages)\n    except refusals:\n",
        "    try:\n        return render(joined(messages))\n    except refusals:\n",
        unit("neighbouring_messages", "test_neighbours_of_one_role_are_answered_and_nothing_else_changes[chatml]"),
    ),
    Mutation(
        "new neighbouring messages are not joined as those of a whole history",
        "trainer/rendering/bridge.py",
        '            elif role == "tool":\n',
        "            elif True:\n",
        unit("neighbouring_messages", "test_answers_between_neighbours_are_continued"),
    ),
    Mutation(
        "log-probs go on after a stop text",
        "trainer/gateway/completions.py",
        "        if stopped:\n            entries.end_at",
        "        if False:\n            entries.end_at",
        unit("text_completions", "test_log_probs_end_with_the_text_before_a_stop_text"),
    ),
    Mutation(
        "a character of several tokens shifts the places of later ones",
        "trainer/gateway/text_logprobs.py",
        "self._length += len(self._rendering.decode([*at, token])) - len(before_it)",
        "self._length += len(text)",
        unit("text_completions", "test_a_tokens_place_is_where_its_first_character_is"),
    ),
    Mutation(
        "a stream of Responses lacks the log-prob of the token that ended it",
        "trainer/gateway/dialects/responses/stream.py",
        "if self._request.logprobs and (rest := ",
        "if False and (rest := ",
        unit("answer_facts", "test_log_probs_come_with_the_deltas_whose_tokens_they_are[text-False]"),
    ),
    Mutation(
        "propertyOrdering has no effect on the answer",
        "core/messages/google.py",
        '        fields["properties"] = {**first, **properties}\n',
        "        pass\n",
        unit("google", "test_properties_are_in_the_order_that_is_asked_for"),
    ),
    Mutation(
        "Google's zeros and empty tools are refused",
        "trainer/gateway/dialects/google/body.py",
        "if name not in ZERO_IS_UNSET or value != 0}",
        "if True}",
        unit("google", "test_zeros_and_empty_tools_ask_for_nothing"),
    ),
    Mutation(
        "a 404 does not name the routes that agl serve adds",
        "trainer/gateway/app.py",
        "served_routes(request.app.routes)",
        "served_routes(request.app.routes[:8])",
        api("routes", "test_what_is_not_served_says_what_is"),
    ),
    Mutation(
        "reasoning is streamed as one delta at its end",
        "trainer/gateway/dialects/deltas.py",
        "            yield from self._reasoning(k, _certain(thought",
        '            yield from self._reasoning(k, "" and _certain(thought',
        unit("streamed_reasoning", "test_reasoning_comes_while_it_is_sampled_where_the_parser_knows_it"),
    ),
    Mutation(
        "a call that is drafted within a thought is sent as text",
        "trainer/gateway/dialects/deltas.py",
        " or self._rendering.is_thinking(choice.ids, prompt_ids=choice.prompt):",
        ":",
        unit("streamed_reasoning", "test_what_is_sent_is_never_withdrawn[package:qwen3]"),
    ),
    Mutation(
        "the beginning of a mark is sent as reasoning",
        "trainer/gateway/dialects/deltas.py",
        "self._reasoning_held_back = max(stop, len(END_THINK), len(self._mark))",
        "self._reasoning_held_back = stop",
        unit("streamed_reasoning", "test_what_is_sent_is_never_withdrawn[spelled:qwen3]"),
    ),
    Mutation(
        "a stop text stays visible in the reasoning",
        "trainer/gateway/calls.py",
        'return replace(parsed, reasoning=(parsed.reasoning or "")[:end] or None)',
        "return parsed",
        unit("streamed_reasoning", "test_a_stop_text_within_the_reasoning_ends_the_answer"),
    ),
    # -- tracing and routing ------------------------------------------------------------------------------------------
    Mutation(
        "the provider's key sent to the gateway",
        "core/tracing/sdk_hooks.py",
        '"Authorization": f"Bearer {rollout.key}"',
        '"Authorization": f"Bearer {self.client.api_key}"',
        unit("routing", "test_a_selected_agents_request_goes_to_the_gateway_with_nothing_of_the_provider"),
    ),
    Mutation(
        "the attempt's key sent to the agent's provider",
        "core/tracing/sdk_hooks.py",
        "if rollout.selection.policy_for(self.scope.agent) is None and not to_gateway:\n"
        "            self._record_messages()\n",
        "if rollout.selection.policy_for(self.scope.agent) is None and not to_gateway:\n"
        "            self._record_messages()\n"
        '            self._copy_options().headers = {"X-Attempt": str(rollout.key)}\n',
        unit("routing", "test_an_unselected_agents_request_reaches_its_provider_exactly_as_before"),
    ),
    Mutation(
        "headers to the gateway not filtered",
        "core/tracing/sdk_hooks.py",
        "            del request.headers[name]\n",
        "            pass\n",
        unit("routing", "test_a_selected_agents_request_goes_to_the_gateway_with_nothing_of_the_provider"),
    ),
    Mutation(
        "prompt replaced in the wrong agent",
        "core/tracing/sdk_hooks.py",
        "rollout.system_prompts.get(self.scope.agent)",
        "next(iter(rollout.system_prompts.values()), None)",
        unit("system_prompts", "test_one_of_two_agents_gets_its_prompt_and_the_other_keeps_the_same_text"),
    ),
    Mutation(
        "prompt replaced in user messages",
        "core/tracing/system_prompts.py",
        'message.get("role") in _ROLES',
        'message.get("role")',
        unit("system_prompts", "test_system_prompts_alone_are_replaced"),
    ),
    # -- tools: what they returned, and which call asked for them -----------------------------------------------------
    Mutation(
        "a framework's mark of a failed tool is not read",
        "core/messages/tool_output.py",
        "return True in _marks(value) or _field",
        "return _field",
        unit("tool_output", "test_what_is_marked_as_failed"),
    ),
    Mutation(
        "content blocks are no texts",
        "core/messages/tool_output.py",
        "if (texts := _block_texts(value)) is not None:",
        "if (texts := None) is not None:",
        unit("tool_output", "test_what_says_that_the_tool_failed"),
    ),
    Mutation(
        "an object that Python wrote as text tells nothing",
        "core/messages/tool_output.py",
        "            return ast.literal_eval(text.strip())",
        "            return None",
        unit("tool_output", "test_the_text_of_a_value_tells_what_the_value_tells"),
    ),
    Mutation(
        "an error of null is a failure",
        "core/messages/tool_output.py",
        "any(bool(fields.get(key)) for key in",
        "any(key in fields for key in",
        unit("tool_output", "test_what_only_looks_like_a_failure"),
    ),
    Mutation(
        "the OpenAI Agents SDK's tools fail by exceptions alone",
        "adapters/openai_agents/tracer.py",
        "if output is None or not output.failed:",
        "if True:",
        unit("adapter_conformance", "TestAdapters::test_what_a_tool_returned_tells_its_outcome[openai_agents]"),
    ),
    Mutation(
        "LangChain's blocks are stored as Python writes a list",
        "adapters/langchain/tracer.py",
        "tool_end(scope, result)\n",
        'tool_end(scope, str(getattr(result, "content", result)))\n',
        unit("adapter_conformance", "TestAdapters::test_what_a_tool_returned_tells_its_outcome[langchain]"),
    ),
    Mutation(
        "an object is judged by the text that its framework made of it",
        "adapters/scopes.py",
        "        _returned[scope] = value\n",
        "        pass\n",
        unit("adapter_conformance", "TestAdapters::test_what_a_tool_returned_tells_its_outcome[langgraph]"),
    ),
    Mutation(
        "a grader's own rule does not judge what a tool returned",
        "trainer/graders/tools.py",
        "tool.attributes.get(semconv.FAILED_BY_RESULT) is True",
        "False",
        unit("graders_trace", "test_a_rule_of_ones_own_judges_what_was_returned_but_not_what_was_raised"),
    ),
    Mutation(
        "a tool that a program runs by hand has no call",
        "core/mdp/span_index.py",
        "for s in joined(spans, self.calls)}",
        "for s in spans}",
        unit("tool_runs", "test_a_call_of_the_gateway_is_joined_and_earns_the_outcome_once"),
    ),
    Mutation(
        "a tool that a program runs by hand is recorded twice",
        "core/tracing/inferred.py",
        "    spans = joined(spans, calls)\n",
        "    spans = list(spans)\n",
        unit("tool_runs", "test_a_call_of_the_gateway_is_joined_and_earns_the_outcome_once"),
    ),
    Mutation(
        "a run by hand is joined to another agent's call",
        "core/mdp/tool_runs.py",
        "        return apart, call.position",
        "        return 0, call.position",
        unit("tool_runs", "test_agents_side_by_side_keep_their_own_calls"),
    ),
    Mutation(
        "a run by hand is joined to the first answer that asked alike",
        "core/mdp/tool_runs.py",
        "call.position > at, abs(at - call.position)",
        "call.position > at, call.position",
        unit("tool_runs", "test_equal_calls_of_two_answers_are_each_their_own"),
    ),
    Mutation(
        "a run by hand with other arguments belongs to no call",
        "core/mdp/tool_runs.py",
        "    matches.add(runs, lambda run, call: matches.is_answered_by(call, run))\n",
        "",
        unit("tool_runs", "test_a_run_with_other_arguments_or_another_name_is_known_by_its_result"),
    ),
    Mutation(
        "a tool that the program calls otherwise is taken for any call",
        "core/mdp/tool_runs.py",
        "if renamed and run.name not in self._names:",
        "if renamed:",
        unit("tool_runs", "test_a_run_with_other_arguments_or_another_name_is_known_by_its_result"),
    ),
    Mutation(
        "what a person answered is a tool's run",
        "adapters/langchain/tracer.py",
        "_persons_answer(inputs) or run.resumed_with",
        "run.resumed_with",
        ("tests/integration/test_tools_by_hand.py::test_a_tool_call_that_a_person_answers_is_no_tools_run",),
    ),
    Mutation(
        "a refused call has no arguments",
        "adapters/failed_calls.py",
        "tool_run(name, arguments, call_id",
        "tool_run(name, None, call_id",
        unit(
            "adapter_conformance",
            "TestAdapters::test_a_call_of_an_unknown_tool_is_an_error_with_its_arguments[langchain-invoke]",
        ),
    ),
    Mutation(
        "Agent Framework's refused calls are lost where the server keeps the history",
        "adapters/agent_framework/tracer.py",
        "(call := issued_call(call_id)) is not None",
        "(call := None) is not None",
        unit(
            "adapter_conformance",
            "TestAdapters::test_a_call_of_an_unknown_tool_is_an_error_with_its_arguments"
            "[agent_framework_responses-ainvoke]",
        ),
    ),
    # -- content switched off, lost spans, the environment, received spans --------------------------------------------
    Mutation(
        "a span keeps texts though they are switched off",
        "core/tracing/open_span.py",
        "    return {name: value for name, value in attributes.items() if name not in semconv.TEXTS}",
        "    return attributes",
        unit("content_off", "test_the_store_has_no_text"),
    ),
    Mutation(
        "an error's status keeps its message though texts are switched off",
        "core/tracing/open_span.py",
        "        if not self._content:\n            code = ",
        "        if self._content is None:\n            code = ",
        unit("content_off", "test_the_store_has_no_text"),
    ),
    Mutation(
        "an attempt's error keeps its message though texts are switched off",
        "trainer/runners/coordinator.py",
        "return report.traceback(content=self.capture_content)",
        "return report.traceback(content=True)",
        unit("content_off", "test_neither_has_it_what_a_reward_function_raises_or_returns"),
    ),
    Mutation(
        "a run's error keeps its message though texts are switched off",
        "trainer/run/run.py",
        "content=self.config.capture_content)",
        "content=True)",
        unit("content_off", "test_neither_has_it_what_a_reward_function_raises_or_returns"),
    ),
    Mutation(
        "the gateway stores its refusals whole though texts are switched off",
        "trainer/gateway/gateway.py",
        "        if why and not self.capture_content:",
        "        if why and self.capture_content is None:",
        unit("content_off", "test_neither_has_it_what_the_gateway_refuses"),
    ),
    Mutation(
        "a command line is stored though texts are switched off",
        "trainer/store/collect.py",
        "    if not content:\n",
        "    if content is None:\n",
        ("tests/integration/test_run_python.py::test_texts_of_errors_and_arguments_are_left_out_on_request[agl run]",),
    ),
    Mutation(
        "spans leave in batches of any size",
        "core/tracing/batches.py",
        " or size + more > BATCH_BYTES):",
        "):",
        unit("span_export", "test_batches_hold_every_span_once_in_order_and_within_bounds"),
    ),
    Mutation(
        "a refused batch is lost whole",
        "core/tracing/batches.py",
        "            self._batches.extendleft([batch[middle:], batch[:middle]])",
        "            self.lost += [span.name for span in batch[middle:]]",
        unit("span_export", "test_of_a_refused_batch_only_the_spans_at_fault_are_lost"),
    ),
    Mutation(
        "a program keeps the texts of all its spans",
        "core/instrument/auto.py",
        "            while self._bytes > KEPT_BYTES or",
        "            while",
        unit("span_export", "test_a_program_keeps_the_texts_of_few_spans"),
    ),
    Mutation(
        "half of a character loses a batch on its way to agl run",
        "trainer/runners/recording_proxy.py",
        "await body.json(loads, self._decoded)",
        "await body.json(then=self._decoded)",
        ("tests/integration/test_run_python.py::test_what_would_lose_spans_loses_none",),
    ),
    Mutation(
        "a child that ends by os._exit loses its last call",
        "core/instrument/auto.py",
        """    for name in ("_exit", "execv", "execve"):""",
        "    for name in ():",
        ("tests/integration/test_run_python.py::test_what_would_lose_spans_loses_none",),
    ),
    Mutation(
        "a report too large for one request is sent in one",
        "trainer/runners/remote/client.py",
        "            await self.deliver(lease, report.spans)\n            report = replace(report, spans=())\n",
        "            pass\n",
        (
            "tests/integration/test_remote_runners.py::"
            "test_a_report_of_any_size_arrives_and_one_span_too_large_is_named",
        ),
    ),
    Mutation(
        "a limit of the user's environment stops agl's tracing",
        "core/tracing/otel_sdk.py",
        "shutdown_on_exit=False, span_limits=UNLIMITED)",
        "shutdown_on_exit=False)",
        unit("otel_environment", "test_no_variable_breaks_or_cuts_a_span_or_prints_a_word"),
    ),
    Mutation(
        "OPENAI_BASE_URL is set for Azure's clients, too",
        "trainer/runners/recording_proxy.py",
        "    if _without_openai(environment, dotenv) is not None:",
        "    if _without_openai(environment, dotenv) is True:",
        ("tests/integration/test_run_azure.py::test_each_provider_has_its_own_variable_and_no_other",),
    ),
    Mutation(
        "Azure's key is sent to OpenAI",
        "trainer/runners/recording_proxy.py",
        """    if is_azure and provider == "openai" and base == PROVIDERS["openai"]:""",
        "    if is_azure is None:",
        ("tests/integration/test_run_azure.py::test_azures_key_is_not_sent_to_openai",),
    ),
    Mutation(
        "a received trace's task is its root's name",
        "trainer/store/http/otlp.py",
        """                if message.role == "user" and message.text:""",
        "                if message.text is None:",
        unit("store_traces", "test_a_traces_task_is_what_was_asked_first"),
    ),
    Mutation(
        "a trace's task that comes after its root is lost",
        "trainer/store/http/otlp.py",
        "            if roots or _asked(spans) is not None:",
        "            if roots:",
        unit("store_traces", "test_a_task_that_comes_after_the_root_is_taken"),
    ),
    Mutation(
        "OPENAI_BASE_URL is set where OPENAI_API_BASE names the server",
        "trainer/runners/recording_proxy.py",
        "    if not azure and (environment.get(propagation.OPENAI_OLD_URL) or propagation.OPENAI_OLD_URL in dotenv):",
        "    if not azure and False:",
        ("tests/integration/test_run_azure.py::test_openai_api_base_is_set_only_where_it_was",),
    ),
    Mutation(
        "a trace whose children come before its root is two rollouts",
        "trainer/store/http/otlp.py",
        "            await self._store.move_spans(trace, rollout_id, attempt)\n",
        "",
        unit("store_traces", "test_a_trace_whose_root_names_its_rollout_is_that_rollout"),
    ),
    Mutation(
        "evaluation events are no rewards",
        "trainer/store/http/otlp.py",
        "[*kept, *evaluated(kept)]",
        "kept",
        unit("store_traces", "test_evaluation_events_are_rewards"),
    ),
    Mutation(
        "texts in another form are said not to be recorded",
        "trainer/traces/conversations.py",
        "any(name.startswith(begin) for name in names)",
        "begin in names",
        unit("traces_messages", "test_texts_in_a_form_that_is_not_read_are_named"),
    ),
    # -- leases and runs ----------------------------------------------------------------------------------------------
    Mutation(
        "a lease reported twice",
        "trainer/store/sql/rollouts.py",
        "if each.status != was and each.status not in ATTEMPT_TRANSITIONS[was]:",
        "if False:",
        ("tests/integration/test_store_conformance.py::test_only_the_table_decides_what_may_follow[sqlite]",),
    ),
    Mutation(
        "any secret proves a lease",
        "trainer/store/sql/rollouts.py",
        "return any([hmac.compare_digest(stored, codec.secret_hash(secret)) for secret in secrets])",
        "return bool(secrets)",
        ("tests/integration/test_store_conformance.py::test_only_the_secret_of_a_lease_proves_it[sqlite]",),
    ),
    Mutation(
        "tried once more than allowed",
        "trainer/store/sql/rollouts.py",
        "rollout.attempts < rollout.config.max_attempts",
        "rollout.attempts <= rollout.config.max_attempts",
        ("tests/integration/test_store_conformance.py::test_a_failure_is_tried_again_until_attempts_run_out[sqlite]",),
    ),
    Mutation(
        "a failure of the infrastructure is worth a reward of 0",
        "trainer/runners/executor.py",
        "if isinstance(error, AglError) or _is_infrastructure(error):",
        "if isinstance(error, AglError):",
        unit("policy_faults", "test_error_reward_scores_no_lost_connection"),
    ),
    Mutation(
        "a rollout without a reward is worth 0",
        "trainer/runners/coordinator.py",
        "if self.rewarded and trajectory.reward is None and trajectory.fault is None:",
        "if False:",
        ("tests/integration/test_bad_input.py::test_a_reward_that_is_not_a_finite_number",),
    ),
    # -- a store's faults, names, clocks, signals ---------------------------------------------------------------------
    Mutation(
        "a lease whose answer was lost is nobody's",
        "trainer/runners/coordinator.py",
        """            if not self._stopped:
                self._give_back(request_id)
            raise
""",
        "            raise\n",
        ("tests/integration/test_leases.py::test_a_rollout_whose_lease_failed_is_leased_again",),
    ),
    Mutation(
        "a lease that was refused halfway is held until its limit",
        "trainer/runners/coordinator.py",
        """        except BaseException:
            self._give_back(request_id, opening)
            raise
""",
        "        except BaseException:\n            raise\n",
        ("tests/integration/test_leases.py::test_a_rollout_whose_lease_failed_is_leased_again",),
    ),
    Mutation(
        "what cannot be given back at once is not given back",
        "trainer/runners/coordinator.py",
        "            await asyncio.sleep(CHECK_SECONDS)\n\n    def _pause",
        "            return\n\n    def _pause",
        ("tests/integration/test_leases.py::test_a_rollout_whose_lease_failed_is_leased_again",),
    ),
    Mutation(
        "a rollout whose worker left unheard costs an attempt",
        "trainer/runners/remote/coordinator.py",
        "await coordinator.give_back(lease)",
        'await coordinator.abandon(lease, "its worker left before it began")',
        ("tests/integration/test_leases.py::test_what_a_worker_leased_and_no_longer_wants_costs_no_attempt",),
    ),
    Mutation(
        "a reward's name is as long as you like",
        "core/mdp/types.py",
        '        require_short(self.name, "a reward", RewardError)\n',
        "",
        unit("rewards", "test_a_name_that_is_too_long_is_said_where_it_is_given"),
    ),
    Mutation(
        "the store takes names that an index does not hold",
        "trainer/store/sql/codec.py",
        'len(text.encode(errors="surrogatepass")) > KEY_BYTES:',
        "False:",
        (
            "tests/integration/test_store_conformance.py::"
            "test_every_store_takes_names_up_to_one_limit_and_says_what_is_longer[sqlite]",
        ),
    ),
    Mutation(
        "the workers of a resumed run lease what was left",
        "trainer/run/workplace.py",
        "            if run.resume:\n                # Workers",
        "            if False:\n                # Workers",
        unit("leftover", "test_workers_lease_nothing_that_was_left_whatever_comes_first"),
    ),
    Mutation(
        "a store's time goes on from the process's start",
        "trainer/store/sql/clock.py",
        "now = self._wall() if self._ahead is None else",
        "now = 1.7e9 if self._ahead is None else",
        ("tests/integration/test_store_lives.py::test_a_moment_is_what_the_clock_says_then_and_no_two_are_the_same",),
    ),
    Mutation(
        "an attempt ends before it began",
        "trainer/store/sql/rollouts.py",
        "case((begun > at, begun), else_=at))",
        "case((begun > at, at), else_=at))",
        ("tests/integration/test_store_lives.py::test_nothing_ends_before_it_began",),
    ),
    Mutation(
        "SQLite writes on into a file that was deleted",
        "trainer/store/sql/sqlite.py",
        "            elif place != known:",
        "            elif False:",
        ("tests/integration/test_store_gone.py::test_nothing_is_acknowledged_that_nobody_can_find",),
    ),
    Mutation(
        "a second SIGTERM ends a command that ends anyway",
        "core/stop_signals.py",
        "if _ends_when_stopped and stopped and number in _AFTERWARDS:",
        "if False:",
        unit("stop_signals", "test_a_command_that_is_stopped_twice_ends_as_if_it_was_stopped_once"),
    ),
    Mutation(
        "how long a rollout took is told by the wall clock",
        "trainer/store/sql/clock.py",
        "return None if began is None else max(0.0, self._steady() - began)",
        "return None",
        ("tests/integration/test_store_lives.py::test_an_end_is_the_beginning_and_the_seconds_since_however_it_comes",),
    ),
    Mutation(
        "how long a run took is told by the wall clock",
        "trainer/run/recorder.py",
        "ended_at = self.run.created_at + time.monotonic() - self._began",
        "ended_at = max(time.time(), self.run.created_at)",
        unit("clock_jumps", "test_a_run"),
    ),
    Mutation(
        "a tool that was inferred took what the wall clock says",
        "core/tracing/inferred.py",
        "if began is not None and chat.sequence is not None and chat.span_id not in self.invented:",
        "if False:",
        unit("clock_jumps", "test_a_tool_between_an_answer_and_the_next_request"),
    ),
    Mutation(
        "a tool that was inferred begins where it ended",
        "core/mdp/order.py",
        "span.seconds if span.attributes.get(semconv.INFERRED) else 0.0",
        "0.0",
        unit("clock_jumps", "test_a_tool_between_an_answer_and_the_next_request"),
    ),
    Mutation(
        "a process began by the wall clock",
        "core/tracing/open_span.py",
        "self._start_time = self._epoch + int(began * 1e9)",
        "self._start_time = int((time.time() - 7.0) * 1e9) - 183_600_000_000_000",
        unit("clock_jumps", "test_a_process_that_began_before_it_had_a_span"),
    ),
    Mutation(
        "a signal before the command runs is lost",
        "trainer/launch/child.py",
        "    if signals.early:\n",
        "    if False:\n",
        unit("clock_jumps", "test_a_signal_before_the_command_runs_is_not_lost"),
    ),
    Mutation(
        "a command under nohup heeds a closed terminal",
        "trainer/launch/child.py",
        "if signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
        unit("clock_jumps", "test_what_nohup_ignores_stays_ignored_by_the_command"),
    ),
    Mutation(
        "a command that ends is ended by one more SIGTERM",
        "core/stop_signals.py",
        "        received.append(signal.SIGINT)\n",
        "        pass\n",
        unit("clock_jumps", "test_a_program_that_ends_keeps_its_exit_status"),
    ),
    Mutation(
        "an inner block leaves the signals to nobody",
        "core/stop_signals.py",
        "or signal.getsignal(n) in _ours]",
        "]",
        unit("clock_jumps", "test_an_inner_block_has_the_signals_and_the_outer_one_has_them_back"),
    ),
    # -- templates that refuse what a policy samples ------------------------------------------------------------------
    Mutation(
        "two tool calls in one answer end a conversation with Llama 3.1's template",
        "trainer/rendering/bridge.py",
        "parts = self._proven(kind) if self._accepts(kind) else self._apart(kind)",
        "parts = self._proven(kind)",
        unit("template_refusals", "test_whatever_is_sampled_the_conversation_continues[llama31]"),
    ),
    Mutation(
        "a history that the template refuses for an answer is nobody's fault",
        "trainer/gateway/calls.py",
        "        if refused is None:\n            raise\n",
        "        if True:\n            raise\n",
        unit("template_refusals", "test_two_tool_calls_that_no_prompt_can_show_are_the_policys_fault"),
    ),
    Mutation(
        "a history that the template refuses is always a policy's fault",
        "trainer/rendering/refusals.py",
        "if not answers or not _accepts(rendering, messages, tools, plain, answers):",
        "if not answers:",
        unit("template_refusals", "test_what_is_refused_with_any_answer_is_no_fault_of_the_policys[order]"),
    ),
    Mutation(
        "half a character in a tool's arguments fails the next prompt",
        "trainer/rendering/normalise.py",
        "_encodable(parsed) if isinstance(parsed, dict)",
        "parsed if isinstance(parsed, dict)",
        unit("template_refusals", "test_whatever_is_sampled_a_refused_history_is_the_policys_fault[chatml]"),
    ),
    Mutation(
        "a result stands under a placeholder's name",
        "trainer/rendering/bridge.py",
        "named = NAME in joint.tail",
        "named = False",
        unit("template_refusals", "test_a_result_stands_under_the_name_of_the_tool_that_was_called"),
    ),
    Mutation(
        "a history that the template refuses forbids every continuation",
        "trainer/rendering/bridge.py",
        "        except TemplateError:\n            return\n",
        "        except ZeroDivisionError:\n            return\n",
        unit("template_refusals", "test_a_second_tool_turn_is_continued_where_no_history_has_one"),
    ),
    Mutation(
        "a package's renderer ends a conversation at two tool calls",
        "trainer/rendering/package_renderer.py",
        "            if len(kind.roles) == 1:\n",
        "            if True:\n",
        unit("template_refusals", "test_two_results_are_written_as_the_template_writes_each[package]"),
    ),
    Mutation(
        "doctor does not say what a template refuses",
        "trainer/rendering/refusals.py",
        "            refused[name] = str(error.__cause__ or error.message)\n",
        "            continue\n",
        unit("template_refusals", "test_doctor_knows_what_a_template_refuses"),
    ),
    Mutation(
        "an answer with another end forks where nothing can fork",
        "trainer/rendering/bridge.py",
        "if last_id not in self.stop_ids or (parts[0].kind.roles != kind.roles and not closed):",
        "if last_id not in self.stop_ids:",
        unit("template_refusals", "test_an_answer_with_another_end_is_closed_where_it_cannot_fork"),
    ),
    Mutation(
        "messages that are written apart repeat the end of the turn before them",
        "trainer/rendering/bridge.py",
        "        if first:\n            return tail\n",
        "        if True:\n            return tail\n",
        unit("template_refusals", "test_an_answer_with_another_end_is_closed_where_it_cannot_fork"),
    ),
    # -- texts that are parts of longer ones --------------------------------------------------------------------------
    Mutation(
        "an imitated answer is encoded as if it began a text",
        "trainer/rendering/rendering.py",
        "        ids = self._model.encode_after(before, text)\n",
        "        ids = self.encode(text)\n",
        unit("token_text", "test_an_imitated_answer_begins_with_the_token_that_the_model_would_produce"),
    ),
    Mutation(
        "what continues a conversation is encoded as if it began a text",
        "trainer/rendering/bridge.py",
        "return self._encode(before, tail)",
        "return self._encode([], tail)",
        unit("token_text", "test_a_continued_conversation_has_the_ids_of_the_whole_one[first-roles-whole]"),
    ),
    Mutation(
        "a forced call is encoded as if it began a text",
        "trainer/rendering/rendering.py",
        "forced = self._model.encode_after(prompt, opening)",
        "forced = self._model.encode(opening)",
        unit("token_text", "test_a_forced_call_is_begun_with_the_ids_that_follow_the_prompt[legacy]"),
    ),
    Mutation(
        "a byte too few takes back characters that were streamed",
        "trainer/rendering/token_text.py",
        "if not self._bytes.keys().isdisjoint(tokens):",
        "if False:",
        unit("token_text", "test_what_is_streamed_adds_up_to_what_is_recorded[first]"),
    ),
    Mutation(
        "the tokens of log-probs are decoded alone",
        "trainer/gateway/dialects/common.py",
        "text = rendering.decode_after(before, [token])",
        "text = rendering.decode([token])",
        unit("token_text", "test_the_tokens_of_log_probs_add_up_to_the_answer[first]"),
    ),
    # -- what answers are held to under every template and renderer --------------------------------------------------
    Mutation(
        "marks that JSON of a schema spells are read",
        "trainer/rendering/rendering.py",
        "            if held is not None:\n",
        "            if False:\n",
        unit("held_forms", "test_json_that_spells_any_mark_arrives_as_it_was_sampled[template qwen35-next to tools]"),
    ),
    Mutation(
        "a schema next to calls without a mark holds nothing",
        "trainer/local/lark.py",
        "        if otherwise is not None:\n",
        '        if otherwise is not None and tag != "{":\n',
        unit("held_forms", "test_json_that_spells_any_mark_arrives_as_it_was_sampled[template llama31-next to tools]"),
    ),
    Mutation(
        "control tokens are text",
        "trainer/rendering/chat_template.py",
        "read = ~np.isin(ids, [token for token in self._control_ids if token not in kept])",
        "read = np.ones(ids.size, bool)",
        unit("held_forms", "test_text_that_spells_control_tokens_is_text_and_real_ones_are_none[template chatml]"),
    ),
    Mutation(
        "an answer that begins as a call does is taken for a schema",
        "trainer/gateway/grammars.py",
        " and reads_as_call(json.loads(schema), call)",
        " and False",
        unit("held_forms", "test_what_a_request_holds_is_held_or_refused_by_name[template llama31]"),
    ),
    Mutation(
        "strict arguments of unknown form are taken without a word",
        "trainer/gateway/grammars.py",
        "    if strict and not call.rests:\n",
        "    if False:\n",
        unit("held_forms", "test_what_a_request_holds_is_held_or_refused_by_name[gemma4]"),
    ),
    Mutation(
        "arguments in elements are of unknown form",
        "trainer/rendering/toolchoice.py",
        "    if not (end and element and begin.endswith(element)",
        "    if True or not (end and element and begin.endswith(element)",
        unit("held_forms", "test_calls_are_held_and_read_in_the_form_of_each_model[glm-4.5]"),
    ),
    Mutation(
        "calls in a section have one each",
        "trainer/rendering/toolchoice.py",
        "    if not call_end:\n",
        "    if True:\n",
        unit("held_forms", "test_calls_are_held_and_read_in_the_form_of_each_model[kimi-k2]"),
    ),
    Mutation(
        "a call that the prompt's thought comes before has no form",
        "trainer/rendering/toolchoice.py",
        '        for answer in (assistant, {**assistant, "reasoning_content": _THOUGHT}):\n',
        "        for answer in (assistant,):\n",
        unit("held_forms", "test_calls_are_held_and_read_in_the_form_of_each_model[nemotron-3]"),
    ),
    Mutation(
        "a second call that is begun is an end",
        "trainer/rendering/rendering.py",
        "        if message.tool_calls and not message.unfinished and self._begins_call(answer):\n",
        "        if False:\n",
        unit("held_forms", "test_a_second_call_that_a_stop_token_ends_is_not_all_that_the_policy_wants[kimi-k2]"),
    ),
    Mutation(
        "calls that an agent does not want in parallel are made",
        "trainer/gateway/gateway.py",
        "        if request.one_call and request.tools and not sampling.grammar:\n",
        "        if False:\n",
        unit("held_forms", "test_parallel_calls_that_an_agent_does_not_want_are_not_made[template qwen25-free]"),
    ),
    Mutation(
        "one call of a list is not held",
        "trainer/gateway/grammars.py",
        "return may_call_one and not rendering.tells_calls_apart(request.tools)",
        "return False",
        unit("held_forms", "test_parallel_calls_that_an_agent_does_not_want_are_not_made[template mistral_v3-free]"),
    ),
    Mutation(
        "a mark in an element ends a call",
        "trainer/rendering/toolparsers.py",
        "at = end if is_whole else tags.block_end(start)",
        "at = tags.block_end(start)",
        unit("toolparsers", "test_a_mark_within_an_argument_is_text"),
    ),
    Mutation(
        "a mark in the arguments of Mistral's calls ends them",
        "trainer/rendering/toolparsers.py",
        "calls, end = _mistral_calls(text, body)",
        "calls, end = _mistral_calls(text[: (text + mark).find(mark, body)], body)",
        unit("toolparsers", "test_a_mark_within_an_argument_is_text"),
    ),
    Mutation(
        "rounds of a template's loops are not counted for requests",
        "trainer/rendering/template_limits.py",
        "    if budget.rounds > ROUNDS:\n",
        "    if False:\n",
        unit("template_limits", "test_what_a_template_does_only_for_some_requests_ends_too"),
    ),
    Mutation(
        "numbers that a template computes for requests have any size",
        "trainer/rendering/template_limits.py",
        "left.bit_length() * right > _BITS",
        "False",
        unit("template_limits", "test_what_a_template_does_only_for_some_requests_ends_too"),
    ),
    Mutation(
        "a template with guards renders another text",
        "trainer/rendering/template_limits.py",
        '    return "".join(texts)\n',
        '    return " ".join(texts)\n',
        unit("template_limits", "test_what_is_rendered_within_limits_is_what_transformers_renders"),
    ),
    Mutation(
        "a recorded schema is compiled without a try",
        "trainer/local/grammar.py",
        "            if matcher := self.recorded(grammar):\n",
        "            if matcher := self.matcher(grammar):\n",
        (
            "tests/integration/test_attacks_schemas.py::"
            "test_a_row_with_a_schema_that_no_gateway_has_admitted_is_refused_before_it_is_compiled",
        ),
    ),
    # -- arguments that are no JSON ----------------------------------------------------------------------------------
    Mutation(
        "NaN among a tool's arguments reaches clients",
        "trainer/rendering/toolparsers.py",
        "ensure_ascii=False, allow_nan=False)",
        "ensure_ascii=False)",
        unit("call_arguments", "test_arguments_are_json_for_every_parser[responses-whole]"),
    ),
    Mutation(
        "arguments that no request may hold are a call",
        "trainer/rendering/toolparsers.py",
        "if _depth_exceeds(arguments, MOST_NESTED):",
        "if False:",
        unit("call_arguments", "test_arguments_that_are_nested_too_deep_are_no_call[a little]"),
    ),
    Mutation(
        "JSON that Python does not read fails a call of a package's renderer",
        "trainer/rendering/package_renderer.py",
        "        except (ValueError, RecursionError):\n            # JSON",
        "        except ZeroDivisionError:\n            # JSON",
        unit("call_arguments", "test_json_that_python_does_not_read_is_text_for_a_packages_renderer[digits-qwen3]"),
    ),
    # -- whose fault an exception is ----------------------------------------------------------------------------------
    Mutation(
        "any JSON that cannot be read is the policy's fault",
        "core/mdp/evidence.py",
        "return bool(inputs) and bool(texts) and all(_is_part(json.loads(each), texts) for each in inputs)",
        "return bool(inputs)",
        unit("policy_faults", "test_any_other_exception_after_a_cut_answer_is_not[another JSON]"),
    ),
    Mutation(
        "what a reward raises is the policy's fault",
        "core/mdp/faults.py",
        "or semconv.AGENT_ERROR not in root.attributes or semconv.REWARD_ERROR in root.attributes:",
        "or semconv.AGENT_ERROR not in root.attributes:",
        unit("policy_faults", "test_what_a_reward_raises_is_never_the_policys[JSON of the answer]"),
    ),
    Mutation(
        "a fault of the user's code leaves a selection to learn from",
        "trainer/algorithms/loop.py",
        '    require_sound(sample.results, f"step {step + 1}")\n',
        "",
        unit("failures", "test_a_run_learns_nothing_from_what_a_fault_has_left[reward-local]"),
    ),
    Mutation(
        "attempts that a later one made good are not counted",
        "trainer/runners/coordinator.py",
        "failures = tuple(self._failures.pop(rollout_id, ()))",
        "failures = tuple(self._failures.pop(rollout_id, ())) if report.error else ()",
        unit("failures", "test_a_rollouts_failures_are_those_of_all_its_attempts"),
    ),
    Mutation(
        "a time-out of a tool is taken for the attempt's limit",
        "trainer/runners/executor.py",
        "if isinstance(error, TimeoutError):",
        "if False:",
        unit("policy_faults", "test_any_other_exception_after_a_cut_answer_is_not[a time-out]"),
    ),
    Mutation(
        "a grader follows a link that a policy left",
        "core/rewards/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        unit("read_text", "test_what_is_no_file_to_read_is_the_default[a link out of the folder]"),
    ),
    Mutation(
        "a limit that a signal cannot set is a reward of 0",
        "core/tracing/main_thread.py",
        '                _note(f"signal.signal({signal.Signals(number).name})")\n',
        "                pass\n",
        unit("main_thread", "test_a_refusal_is_asked_for_once"),
    ),
    Mutation(
        "limits by signals are not watched while a run trains",
        "core/agents/frameworks.py",
        "    with carried_across_threads(), watched():\n",
        "    with carried_across_threads():\n",
        unit("main_thread", "test_an_evaluation_ends_too"),
    ),
    Mutation(
        "a limit leaves the interpreter's mark that an exception waits",
        "core/tracing/main_thread.py",
        "            over = True\n",
        "            over = True\n"
        "            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)\n",
        unit("main_thread", "test_a_limit_leaves_an_interpreter_in_which_profilers_and_debuggers_work"),
    ),
    Mutation(
        "a limit fires though its block has ended",
        "core/tracing/main_thread.py",
        "            if not over:\n",
        "            if True:\n",
        unit("main_thread", "test_a_limit_that_fires_as_its_block_ends_raises_nothing_later"),
    ),
    Mutation(
        "an overflow has no words that frameworks know",
        "trainer/gateway/dialects/error_forms.py",
        "    if not isinstance(error, PromptTooLongError):\n",
        "    if True:\n",
        unit("error_forms", "test_a_framework_knows_an_overflow[langchain_anthropic]"),
    ),
    Mutation(
        "the Messages API takes a schema and ignores it",
        "trainer/gateway/dialects/messages/body.py",
        "        grammar=_grammar(body),\n",
        "",
        (
            "tests/integration/test_structured_output.py::"
            "test_every_rollout_parses_and_is_trained_exactly[anthropic_format-1]",
        ),
    ),
    Mutation(
        "a strict tool of the Messages API is held to nothing",
        "trainer/gateway/dialects/messages/body.py",
        "    return checked(Tool, tool, where, UNSUPPORTED_OF_TOOL)\n",
        "    return checked(Tool, tool, where, UNSUPPORTED_OF_TOOL) | {'strict': None}\n",
        (
            "tests/integration/test_structured_output.py::"
            "test_every_rollout_parses_and_is_trained_exactly[anthropic_free_tool-1]",
        ),
    ),
    Mutation(
        "a format with a name that the provider refuses is taken",
        "trainer/gateway/dialects/chat/body.py",
        'response_format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] | None = None',
        "response_format: dict[str, Any] | None = None",
        unit("gateway", "test_a_format_that_cannot_be_held_is_refused"),
    ),
    Mutation(
        "a response object lacks a field of the schema",
        "trainer/gateway/dialects/responses/answer.py",
        '        "presence_penalty": 0.0,\n',
        "",
        unit("responses", "test_every_response_object_fits_the_schema_of_open_responses[nothing]"),
    ),
    Mutation(
        "a misspelt field within an object of a request is taken",
        "trainer/gateway/dialects/common.py",
        'CLOSED = ConfigDict(extra="forbid", strict=True)',
        'CLOSED = ConfigDict(extra="ignore", strict=True)',
        api("parameters", "test_every_fault_within_a_parameter_is_refused_at_its_place"),
    ),
    Mutation(
        "a value that the provider refuses is taken and repeated",
        "trainer/gateway/dialects/responses/body.py",
        '    context_compression: Literal["auto", "enabled", "disabled"] | None\n',
        "    context_compression: Any\n",
        api("parameters", "test_every_fault_within_a_parameter_is_refused_at_its_place"),
    ),
    Mutation(
        "a fault is said to be where a union's tag has the name of a field",
        "trainer/gateway/dialects/common.py",
        '    if not rest and error == "extra_forbidden":\n        return None\n',
        "",
        api("parameters", "test_every_fault_within_a_parameter_is_refused_at_its_place"),
    ),
    Mutation(
        "an overflow under Responses is of a field of Chat Completions",
        "trainer/gateway/dialects/error_forms.py",
        'return openai_error(error, request_id, history="input")',
        "return openai_error(error, request_id)",
        api("refused_schemas", "test_a_conversation_that_is_too_long_is_named_by_its_field"),
    ),
    Mutation(
        "a schema that cannot be held is of response_format in every API",
        "trainer/gateway/gateway.py",
        '    field = request.schema_field if tool is None else "tools"\n',
        '    field = "response_format" if tool is None else "tools"\n',
        api("refused_schemas", "test_the_schema_of_an_answer_is_named_by_its_field"),
    ),
    Mutation(
        "a refused schema shows agl's own grammar",
        "trainer/local/schema_worker.py",
        'return _LISTING.sub("", _PLACE.sub("", matcher.get_error()))',
        "return matcher.get_error()",
        api("refused_schemas", "test_the_schema_of_an_answer_is_named_by_its_field"),
    ),
    Mutation(
        "the words that LangChain looks for in a refused schema are missing",
        "trainer/gateway/dialects/error_forms.py",
        "    if isinstance(error, SchemaError):\n",
        "    if False and isinstance(error, SchemaError):\n",
        api("refused_schemas", "test_the_schema_of_an_answer_is_named_by_its_field"),
    ),
    Mutation(
        "the 404 of OpenAI is of a type that it does not have",
        "trainer/gateway/dialects/error_forms.py",
        '    404: Types("invalid_request_error", "not_found_error", "NOT_FOUND"),\n',
        '    404: Types("not_found_error", "not_found_error", "NOT_FOUND"),\n',
        api("routes", "test_the_models_of_openais_sdk"),
    ),
    Mutation(
        "a response that failed has a code that its client does not know",
        "trainer/gateway/dialects/responses/stream.py",
        '"code": failure_code(error), ',
        '"code": error.code or "server_error", ',
        api("openai_answers", "test_a_response_that_fails_has_what_was_sent_and_is_kept"),
    ),
    Mutation(
        "a response that failed has no output",
        "trainer/gateway/dialects/responses/stream.py",
        'self._response("failed", error=details, output=self._sent_items())',
        'self._response("failed", error=details)',
        api("openai_answers", "test_a_response_that_fails_has_what_was_sent_and_is_kept"),
    ),
    Mutation(
        "a response that failed is not found",
        "trainer/gateway/dialects/responses/stream.py",
        "        store(self._pending, self._request, response, self._request.new)\n",
        "",
        api("openai_answers", "test_a_response_that_fails_has_what_was_sent_and_is_kept"),
    ),
    Mutation(
        "a response that failed is continued",
        "trainer/gateway/stored_responses.py",
        ' or stored.response.get("status") == "failed":\n',
        ":\n",
        api("openai_answers", "test_a_response_that_fails_has_what_was_sent_and_is_kept"),
    ),
    Mutation(
        "options of caches are not repeated",
        "trainer/gateway/dialects/responses/answer.py",
        '        "prompt_cache_options": _cache_options(body.prompt_cache_options),\n',
        "",
        api("openai_answers", "test_a_response_repeats_what_it_was_asked[prompt_cache_options]"),
    ),
    Mutation(
        "Chat's chunks do not say which tier served",
        "trainer/gateway/dialects/chat/stream.py",
        '            "service_tier": service_tier(request.body),\n',
        "",
        api("openai_answers", "test_chat_says_which_tier_served"),
    ),
    Mutation(
        "a wish for no alternatives is one for log-probs",
        "trainer/gateway/dialects/responses/body.py",
        "logprobs = bool(body.top_logprobs) or",
        "logprobs = body.top_logprobs is not None or",
        api("openai_answers", "test_no_alternatives_are_no_wish_for_log_probs"),
    ),
    Mutation(
        "an answer that refuses is an empty turn",
        "trainer/rendering/normalise.py",
        'content = message.get("content") or message.get("refusal")',
        'content = message.get("content")',
        api("openai_answers", "test_an_answer_that_refuses_is_in_the_prompt"),
    ),
    Mutation(
        "answers that refuse in other words are the same",
        "trainer/rendering/digests.py",
        'text_of(message.get("content") or message.get("refusal"))',
        'text_of(message.get("content"))',
        api("openai_answers", "test_answers_that_refuse_differently_are_different_histories"),
    ),
    Mutation(
        "sealed reasoning that comes back is dropped",
        "trainer/gateway/dialects/responses/items.py",
        '        item["content"] = _opened(item["encrypted_content"])\n',
        "        pass\n",
        api("openai_answers", "test_reasoning_comes_back_sealed"),
    ),
    Mutation(
        "a streamed answer's reasoning has no seal",
        "trainer/gateway/dialects/responses/answer.py",
        'return item | {"encrypted_content": sealed(text)} if sealing else item',
        "return item",
        api("openai_answers", "test_reasoning_comes_back_sealed"),
    ),
    Mutation(
        "a stored call of the input has no status",
        "trainer/gateway/dialects/responses/items.py",
        'for name in ("call_id", "name", "arguments")} | {"status": "completed"}',
        'for name in ("call_id", "name", "arguments")}',
        api("openai_answers", "test_stored_inputs_fit_the_sdks_items"),
    ),
    Mutation(
        "a history that ends with the model is not counted",
        "trainer/gateway/dialects/responses/body.py",
        "items = [] if counting and previous is not None and body.input is None else _items(body)",
        "items = _items(body)",
        api("openai_answers", "test_tokens_of_a_history_that_ends_with_the_model_are_counted"),
    ),
    Mutation(
        "log-probs are those of the reasoning as well",
        "trainer/gateway/dialects/content_tokens.py",
        "            found = self._next not in outside and ",
        "            found = ",
        unit("answer_facts", "test_log_probs_come_with_the_deltas_whose_tokens_they_are[thought-False]"),
    ),
    Mutation(
        "log-probs next to the ids of all tokens are those of the text alone",
        "trainer/gateway/dialects/content_tokens.py",
        "            if found is not False or self._every:\n",
        "            if found is not False:\n",
        unit("answer_facts", "test_log_probs_next_to_the_ids_of_all_tokens_are_those_of_all_tokens"),
    ),
    Mutation(
        "the beginning of a call without a mark is sent as JSON of the schema",
        "trainer/rendering/toolchoice.py",
        "text.startswith(form[0]) or form[0].startswith(text) for form",
        "text.startswith(form[0]) for form",
        unit("held_forms", "test_a_stream_next_to_a_schema_adds_up_to_the_whole_answer[template llama31]"),
    ),
    Mutation(
        "a call that is cut is streamed as text by a parser that knows no beginnings",
        "trainer/gateway/dialects/deltas.py",
        " or self._begins_like_a_call(cut.content, choice.grammar)",
        "",
        unit("held_forms", "test_a_stream_next_to_a_schema_adds_up_to_the_whole_answer[llama-3]"),
    ),
    Mutation(
        "the space around a thought is kept for JSON and removed for a call",
        "trainer/rendering/rendering.py",
        'around_thoughts = None if self.always_reads_calls else "\\n"',
        'around_thoughts = "\\n"',
        unit("held_forms", "test_a_stream_next_to_a_schema_adds_up_to_the_whole_answer[qwen3]"),
    ),
    Mutation(
        "a grammar allows calls that the parser does not read",
        "trainer/gateway/grammars.py",
        "several=served.rendering.reads_several_calls and not request.one_call",
        "several=not request.one_call",
        unit("allowed_answers", "test_as_many_calls_are_read_as_an_answer_may_have[llama-3]"),
    ),
    Mutation(
        "a text that is held to strict calls spells the mark of one",
        "trainer/local/lark.py",
        "{_escaped(before)}/ & {tagless} & {thoughtless}",
        "{_escaped(before)}/ & {thoughtless}",
        unit("allowed_answers", "test_a_text_before_a_call_hides_it_nowhere"),
    ),
    Mutation(
        "a text before a call that begins as a thought does hides the call",
        "trainer/local/lark.py",
        "{_escaped(before)}/ & {tagless} & {thoughtless}",
        "{_escaped(before)}/ & {tagless}",
        unit("allowed_answers", "test_a_text_before_a_call_hides_it_nowhere"),
    ),
    Mutation(
        "white space comes before a call where it is a text",
        "trainer/gateway/grammars.py",
        "        spaced=call.is_text,\n",
        "",
        unit("allowed_answers", "test_what_a_grammar_allows_is_what_the_parser_reads[inkling]"),
    ),
    Mutation(
        "a call of a form without schemas may be any text",
        "trainer/rendering/toolchoice.py",
        "in self.rests or self.loose",
        "in self.rests",
        unit("allowed_answers", "test_what_a_grammar_allows_is_what_the_parser_reads[gemma4]"),
    ),
    Mutation(
        "a value that is a mark of the model is tried",
        "trainer/local/lark.py",
        "found = next((mark for mark in self._marks if mark in written), None)",
        "found = None",
        unit("allowed_answers", "test_a_name_or_value_with_a_mark_of_the_model_is_refused_by_name"),
    ),
    Mutation(
        "the name of an element has what ends it",
        "trainer/local/lark.py",
        "found = next((end for end in _ends_of(style, what) if end in text), None)",
        "pass",
        unit("allowed_answers", "test_what_ends_an_element_is_in_no_name_or_value_of_it"),
    ),
    Mutation(
        "a text within JSON within an element spells its end",
        "trainer/local/lark.py",
        "_json(_endless(_closed(one) | shared))",
        "_json(_closed(one) | shared)",
        unit("allowed_answers", "test_a_list_in_an_element_does_not_spell_its_end"),
    ),
    Mutation(
        "the tokens of a call are those of a text that begins as its mark does",
        "trainer/rendering/chat_template.py",
        "if isinstance(piece, ToolCall) and end > at:",
        "if False:",
        unit("streamed_tokens", "test_a_text_that_ends_as_a_mark_begins_is_whole"),
    ),
    Mutation(
        "the marks of an empty thought are those of a text that begins as they do",
        "trainer/rendering/rendering.py",
        "if not thought and self.always_reads_calls:",
        "if False:",
        unit("streamed_tokens", "test_a_text_that_ends_as_a_mark_begins_is_whole"),
    ),
    Mutation(
        "a thought behind a text is counted from the beginning",
        "trainer/rendering/rendering.py",
        "            return self._places_within(ids, spans)\n",
        "            pass\n",
        unit("streamed_tokens", "test_the_tokens_of_a_thought_behind_a_text_are_its_own"),
    ),
    Mutation(
        "the end of a prompt that is sampled takes back the text before it",
        "trainer/rendering/package_renderer.py",
        'if name == "llama-3" else set[int]()',
        'if name == "" else set[int]()',
        unit("streamed_tokens", "test_a_text_that_ends_as_a_mark_begins_is_whole"),
    ),
    Mutation(
        "a thought that begins behind a text takes the text back",
        "trainer/rendering/package_renderer.py",
        "        if begun is not None:\n",
        "        if False:\n",
        unit("streamed_tokens", "test_a_text_that_ends_as_a_mark_begins_is_whole"),
    ),
    Mutation(
        "a call that ends a thought is streamed as a part of it",
        "trainer/gateway/dialects/deltas.py",
        "self._reasoning_held_back = max(stop, len(END_THINK), len(self._mark))",
        "self._reasoning_held_back = max(stop, len(END_THINK))",
        unit("streamed_tokens", "test_a_call_that_ends_a_thought_is_no_part_of_it"),
    ),
    Mutation(
        "a character of several tokens is no part of a text",
        "trainer/gateway/dialects/content_tokens.py",
        "for end in range(place + 2, place + 2 + _MOST_PARTS):",
        "for end in range(0):",
        unit("streamed_reasoning", "test_log_probs_of_a_text_behind_a_call_are_not_the_calls"),
    ),
    Mutation(
        "a thought that follows a text is sent before it has ended",
        "trainer/gateway/dialects/deltas.py",
        "self._is_within_a_later_thought(choice) or ",
        "",
        unit("streamed_reasoning", "test_what_is_sent_is_never_withdrawn[package:deepseek-v4]"),
    ),
    Mutation(
        "what looks like a call is moved to the end of a text",
        "trainer/rendering/package_renderer.py",
        "        if not tools and (message := ",
        "        if False and (message := ",
        unit("streamed_reasoning", "test_what_is_sent_is_never_withdrawn[package:glm-4.5]"),
    ),
    Mutation(
        "the path of a stored completion is refused without a reason",
        "trainer/gateway/app.py",
        'if re.search(r"/chat/completions/[^/]", request.url.path):',
        "if False:",
        api("features", "test_a_path_that_is_not_served_says_why"),
    ),
    Mutation(
        "an API's models are listed in another API's form",
        "trainer/gateway/dialects/detection.py",
        '    if "anthropic-version" in request.headers:\n        return MESSAGES\n',
        "",
        api("routes", "test_the_models_of_anthropics_sdk[]"),
    ),
    Mutation(
        "an agent's name decides which API a request is of",
        "trainer/gateway/dialects/detection.py",
        'r".*/(v[0-9][a-z0-9]*)/([^/]+)"',
        'r".*?/(v[0-9][a-z0-9]*)/([^/]+)"',
        api("routes", "test_the_api_of_a_path_is_told_without_headers"),
    ),
    Mutation(
        "what is not served is refused in the form of OpenAI",
        "trainer/gateway/app.py",
        "    return dialect_of(request).error_body(refused, request.state.request_id), refused.status\n",
        "    return CHAT.error_body(refused, request.state.request_id), refused.status\n",
        api("routes", "test_what_is_not_served_is_refused_in_the_form_of_its_api"),
    ),
    Mutation(
        "a file beside a text is dropped",
        "trainer/gateway/dialects/google/body.py",
        "    part = _object(kind, value, where, UNSUPPORTED_OF_PART)\n",
        "    if isinstance(value, dict):\n"
        "        value = {k: value[k] for k in value if k not in UNSUPPORTED_OF_PART}\n"
        "    part = _object(kind, value, where)\n",
        unit("google", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "a tool of Google's servers beside functions is dropped",
        "trainer/gateway/dialects/google/body.py",
        "    tool = _object(Tool, value, where, UNSUPPORTED_OF_TOOL)\n",
        "    tool = _object(Tool, {k: v for k, v in value.items() if k not in UNSUPPORTED_OF_TOOL}, where)\n",
        unit("google", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "a function that is not there may be called",
        "trainer/gateway/dialects/google/body.py",
        "        if name not in tool_names(tools):\n",
        "        if not tools:\n",
        unit("google", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "a result under the role of a tool is refused",
        "core/messages/google.py",
        'RESULT_ROLES = ("function", "tool")',
        'RESULT_ROLES = ("function",)',
        unit("google", "test_the_result_of_a_function_may_have_any_role_that_clients_give_it"),
    ),
    Mutation(
        "a single content or part is no list",
        "trainer/gateway/dialects/google/body.py",
        '    turns = google.listed(body.get("contents"))\n',
        '    turns = expect(body.get("contents") or [], list, "contents", "is no list")\n',
        unit("google", "test_a_single_object_is_a_list_of_one"),
    ),
    Mutation(
        "the other of two schemas is dropped",
        "trainer/gateway/dialects/google/body.py",
        "    if first in fields and second in fields:\n",
        "    if False:\n",
        unit("google", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "the field of a schema has the name of the other",
        "trainer/gateway/dialects/google/body.py",
        'expect(schema, dict, f"generationConfig.{name}"',
        'expect(schema, dict, "generationConfig.responseSchema"',
        unit("google", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "tokens of a history that ends with the model are not counted",
        "trainer/gateway/dialects/google/body.py",
        """    if contents[-1].get("role") == "model" and not counting:""",
        """    if contents[-1].get("role") == "model":""",
        unit("google", "test_counted_tokens_are_those_of_the_prompt_and_no_call"),
    ),
    Mutation(
        "tokens of a history that ends with the assistant are not counted",
        "trainer/gateway/dialects/messages/body.py",
        """    if history[-1].role == "assistant" and not counting:""",
        """    if history[-1].role == "assistant":""",
        unit("messages", "test_counted_tokens_are_those_of_the_prompt_and_no_call"),
    ),
    Mutation(
        "a single part of a system prompt is not replaced",
        "core/tracing/system_prompts.py",
        'isinstance(own.get("parts"), list | Mapping)',
        'isinstance(own.get("parts"), list)',
        unit("google", "test_system_prompts_are_replaced"),
    ),
    Mutation(
        "a misspelt field within an object of Google's is taken",
        "trainer/gateway/dialects/google/body.py",
        '_object(ThinkingConfig, config.get("thinkingConfig") or {}, "generationConfig.thinkingConfig")',
        'google.camel(config.get("thinkingConfig"))',
        api("parameters", "test_every_fault_within_a_type_of_googles_sdk_is_refused_at_its_place"),
    ),
    Mutation(
        "a misspelt field of a block is taken",
        "trainer/gateway/dialects/messages/body.py",
        "    return checked(kinds[kind], value, where, UNSUPPORTED_OF_BLOCK.get(kind, {}))\n",
        "    return value\n",
        unit("messages", "test_what_cannot_be_read_is_refused"),
    ),
    Mutation(
        "an unknown effort of Messages is taken",
        "trainer/gateway/dialects/messages/body.py",
        'Effort = Literal["low", "medium", "high", "xhigh", "max"]\n',
        "Effort = str\n",
        api("parameters", "test_every_fault_within_a_parameter_is_refused_at_its_place"),
    ),
    Mutation(
        "thoughts that are to be omitted are shown",
        "trainer/gateway/dialects/messages/answer.py",
        'shown = "" if request.body.omits_thoughts else reasoning',
        "shown = reasoning",
        unit("messages", "test_omitted_thoughts_are_the_same_whole_and_streamed"),
    ),
    Mutation(
        "thoughts that are to be omitted are streamed",
        "trainer/gateway/dialects/messages/stream.py",
        "            if not self._request.body.omits_thoughts:\n",
        "            if True:\n",
        unit("messages", "test_omitted_thoughts_are_the_same_whole_and_streamed"),
    ),
    Mutation(
        "an error of Anthropic's API has no id of its request",
        "trainer/gateway/app.py",
        "    return dialect_of(request).error_body(refused, request.state.request_id), refused.status\n",
        "    return dialect_of(request).error_body(refused, None), refused.status\n",
        api("routes", "test_what_is_not_served_is_refused_in_the_form_of_its_api"),
    ),
    Mutation(
        "a stream's error has no id of its request",
        "trainer/gateway/dialects/messages/stream.py",
        "anthropic_error(error, self._pending.response_id)",
        "anthropic_error(error)",
        unit("messages", "test_an_attempt_that_ends_tells_its_streams"),
    ),
    Mutation(
        "a page of models begins with the model before it",
        "trainer/gateway/dialects/model_forms.py",
        'first = _place(ids, query, "after_id") + 1',
        'first = _place(ids, query, "after_id")',
        api("routes", "test_anthropics_sdk_lists_every_model_page_by_page"),
    ),
    Mutation(
        "a page of models before one begins the list",
        "trainer/gateway/dialects/model_forms.py",
        "models[max(first, end - limit) : end]",
        "models[first : min(end, first + limit)]",
        api("routes", "test_anthropics_sdk_lists_every_model_page_by_page"),
    ),
    Mutation(
        "the last page of Google's models is missing",
        "trainer/gateway/dialects/model_forms.py",
        "if first + size < len(names) else {}",
        "if first + size < len(names) - 1 else {}",
        api("routes", "test_googles_sdk_lists_every_model_page_by_page"),
    ),
    Mutation(
        "a stop text within a second call reads as an answer that was cut",
        "trainer/gateway/gateway.py",
        " and bool(parsed.tool_calls) and stop_text is None",
        " and bool(parsed.tool_calls)",
        unit("cut_answers", "test_an_answer_that_a_stop_text_ends_anywhere_says_so"),
    ),
    Mutation(
        "a stop text after a call is not the reason in Messages",
        "trainer/gateway/dialects/messages/answer.py",
        "    if reply.stop_text is not None:\n",
        '    if reply.stop_text is not None and reply.finish_reason != "tool_calls":\n',
        unit("cut_answers", "test_an_answer_that_a_stop_text_ends_anywhere_says_so"),
    ),
    Mutation(
        "a context that is full reads as the most tokens of a request",
        "trainer/gateway/dialects/messages/answer.py",
        "if filled and sampled < chat.sampling.max_tokens:",
        "if filled and sampled > chat.sampling.max_tokens:",
        unit("cut_answers", "test_what_cut_an_answer_has_the_words_of_its_api"),
    ),
    Mutation(
        "an answer of as many tokens as were asked for reads as a full context",
        "trainer/gateway/dialects/messages/answer.py",
        "if filled and sampled < chat.sampling.max_tokens:",
        "if filled:",
        unit("cut_answers", "test_what_cut_an_answer_has_the_words_of_its_api"),
    ),
    Mutation(
        "a stream of Messages begins without the counts of cached tokens",
        "trainer/gateway/dialects/messages/stream.py",
        "usage(TokenCounts(prompt_tokens, cached=0, sampled=0, reasoning=0))",
        '{"input_tokens": prompt_tokens, "output_tokens": 0}',
        unit("messages", "test_a_stream_counts_tokens_as_the_whole_answer_does"),
    ),
    Mutation(
        "an overloaded server reads as a broken one",
        "trainer/gateway/dialects/error_forms.py",
        '    529: Types("server_error", "overloaded_error", "UNAVAILABLE"),\n',
        "",
        unit("error_forms", "test_an_sdk_raises_what_it_raises_of_its_provider"),
    ),
    Mutation(
        "a request has another id than its call",
        "trainer/gateway/http.py",
        "        request.state.request_id = pending.response_id\n",
        "",
        api("routes", "test_the_sdk_of_openai_shows_the_id_of_the_recorded_call"),
    ),
    Mutation(
        "Anthropic's SDK sees no id",
        "trainer/gateway/dialects/messages/__init__.py",
        ', request_id_header="request-id"',
        "",
        api("routes", "test_the_sdk_of_anthropic_shows_the_id_of_the_recorded_call"),
    ),
    Mutation(
        "what asks for nothing is refused",
        "trainer/gateway/dialects/common.py",
        " and value not in refused[name].neutral:",
        ":",
        api("parameters", "test_a_neutral_value_is_taken_and_any_other_is_refused_by_name"),
    ),
    Mutation(
        "what a policy cannot honour is dropped without a word",
        "trainer/gateway/dialects/common.py",
        "    require_neutral(data, refused, where)\n    for name in data:\n",
        "    for name in data:\n",
        api("parameters", "test_a_neutral_value_is_taken_and_any_other_is_refused_by_name"),
    ),
    Mutation(
        "null is a value",
        "trainer/gateway/dialects/common.py",
        "if name in known and value is not None}",
        "if name in known}",
        api("parameters", "test_null_is_taken_for_every_parameter"),
    ),
    Mutation(
        "a parameter of an SDK is not known",
        "trainer/gateway/dialects/chat/body.py",
        '    "moderation": MODERATION,\n',
        "",
        api("parameters", "test_null_is_taken_for_every_parameter"),
    ),
    Mutation(
        "a tool that is loaded later is offered at once",
        "trainer/gateway/dialects/messages/body.py",
        "    return checked(Tool, tool, where, UNSUPPORTED_OF_TOOL)\n",
        "    return checked(Tool, {k: v for k, v in tool.items() if k not in UNSUPPORTED_OF_TOOL}, where)\n",
        api("features", "test_what_agents_ask_for[messages]"),
    ),
    Mutation(
        "the policy sees tools that may not be called",
        "trainer/gateway/dialects/common.py",
        '    allowed = [tool for tool in tools if tool["function"]["name"] in names]\n',
        "    allowed = tools\n",
        api("features", "test_what_agents_ask_for[responses]"),
    ),
    Mutation(
        "a WebSocket is refused without the reason",
        "trainer/gateway/app.py",
        '    if "upgrade" in request.headers:\n',
        "    if False:\n",
        api("features", "test_a_websocket_is_refused_with_the_reason"),
    ),
    Mutation(
        "math-verify is 0 for every right answer",
        "core/tracing/main_thread.py",
        "    _restore.append(when_imported(_MATH_VERIFY, _limit_without_signals))\n",
        "",
        unit("main_thread", "test_it_works[sync-by_math_verify-local]"),
    ),
    Mutation(
        "a sync reward of an async agent cannot run a loop",
        "core/rewards/function.py",
        "else await in_thread(call)",
        "else call()",
        unit("main_thread", "test_it_works[async-by_loop-local]"),
    ),
    Mutation(
        "a worker stops when a process that the reward has forked is ended",
        "trainer/runners/process/worker.py",
        "    os.register_at_fork(after_in_child=_forget_signals)\n",
        "",
        unit("main_thread", "test_it_works[sync-by_child-process]"),
    ),
    Mutation(
        "a cut answer costs nothing",
        "trainer/run/faults.py",
        "reward = Reward(NAME, lowest - earned,",
        "reward = Reward(NAME, 0.0,",
        unit("policy_faults", "test_a_cut_answer_is_trained_with_the_lowest_reward_of_its_group"),
    ),
    Mutation(
        "order of the dataset lost on resume",
        "trainer/run/batches.py",
        "np.random.default_rng([self.seed, epoch]).permutation(n)",
        "np.random.default_rng().permutation(n)",
        unit("batches"),
    ),
    Mutation(
        "a rollout that runs ahead counts too late",
        "trainer/algorithms/ahead.py",
        "self._start(number, step - 1 + bound, index)",
        "self._start(number, step + bound, index)",
        unit("ahead", "test_every_group_counts_once_and_none_too_late"),
    ),
    Mutation(
        "an answer hides that its weights changed",
        "trainer/local/engine/engine.py",
        "if not row.versions or row.versions[-1][1] != self._version(row):",
        "if not row.versions:",
        unit("engine", "test_a_weight_update_is_seen_by_the_next_step_even_of_a_running_request"),
    ),
    Mutation(
        "what is done alike in every task is imitated once",
        "trainer/traces/choice.py",
        "digest = task, call_digest(transition.call)",
        'digest = b"", call_digest(transition.call)',
        unit("traces", "test_what_is_done_alike_in_several_tasks_counts_in_each"),
    ),
    Mutation(
        "a resumed run takes rollouts of older weights",
        "trainer/run/resume.py",
        "if call.newest_version > version or version - call.policy_version > allowed:",
        "if False:",
        unit("leftover", "test_what_other_weights_sampled_is_run_again"),
    ),
    # -- servers, memory, graders, statistics -------------------------------------------------------------------------
    Mutation(
        "Host header not checked",
        "trainer/http/browsers.py",
        "if self._loopback and not (len(hosts) == 1",
        "if False and not (len(hosts) == 1",
        ("tests/integration/test_attacks_web.py::test_a_store_answers_no_rebound_name_and_no_other_site",),
    ),
    Mutation(
        "body without a limit",
        "trainer/http/limits.py",
        "if self.size > self._limits.body_bytes:",
        "if False:",
        unit("gateway_security", "test_a_body_without_end_is_refused"),
    ),
    Mutation(
        "values of a body are not counted",
        "trainer/http/bodies.py",
        "    if len(content) > 2 * limits.body_values:",
        "    if False:",
        bodies("no_route_makes_objects_of_such_a_body[store-dense]"),
    ),
    Mutation(
        "a large body is read on the event loop",
        "trainer/http/bodies.py",
        "        return await self._turn.run(function, self.content, *arguments)",
        "        return function(self.content, *arguments)",
        bodies("spans_of_a_program_are_read_off_the_loop"),
    ),
    Mutation(
        "a packed body has no bound",
        "trainer/http/bodies.py",
        "decompress(content, most + 1)",
        "decompress(content)[: most]",
        bodies("what_is_packed_is_unpacked_to_a_bound"),
    ),
    Mutation(
        "a lease that nobody knows has turns of its own",
        "trainer/http/turns.py",
        "            if lease is not None and await self._is_open(*lease, secret):",
        "            lease = lease or (secret, 1)\n            if lease:",
        bodies("turns_are_those_of_a_lease_that_is_open_or_of_a_key"),
    ),
    Mutation(
        "a method that waits keeps its sender's turn",
        "trainer/wire/server.py",
        "                if method.name not in waiting:",
        "                if True:",
        bodies("a_method_that_waits_does_not_keep_its_senders_turn"),
    ),
    Mutation(
        "each request of an application has turns of its own",
        "trainer/gateway/application.py",
        "            turns=self.turns.of(application),\n",
        "",
        bodies("each_application_has_turns_of_its_own"),
    ),
    Mutation(
        "fields of protobuf are not counted",
        "trainer/store/http/otlp.py",
        "    check_protobuf(body, _request_fields(), limits)\n",
        "",
        bodies("protobuf_is_counted_before_it_is_objects"),
    ),
    Mutation(
        "another encoding hides values",
        "trainer/wire/methods.py",
        'json.loads(text.decode("utf-8", "surrogatepass"))',
        "json.loads(text)",
        bodies("text_in_another_encoding_hides_nothing"),
    ),
    Mutation(
        "a sandboxed agent calls what it likes",
        "guests/harnesses/agl_harnesses/front.py",
        "        if not is_permitted(api, request.method, path):",
        "        if False:",
        bodies("a_sandboxed_agent_calls_models_and_nothing_else_with_the_users_key"),
    ),
    Mutation(
        "a sandboxed agent sends another's key along",
        "guests/harnesses/agl_harnesses/front.py",
        "                headers, left_out = permitted_headers(headers, self._allow)\n",
        "                left_out = []\n",
        bodies("a_sandboxed_agent_calls_models_and_nothing_else_with_the_users_key"),
    ),
    Mutation(
        "0.3's proxy keeps every attempt that a URL names",
        "guests/agentlightning/agl_agentlightning/llm_proxy.py",
        "        while len(self._attempts) > _MOST_ATTEMPTS:",
        "        while False:",
        ("tests/integration/test_attacks_bodies.py::test_no_server_keeps_what_a_client_makes_up[llm_proxy]",),
    ),
    Mutation(
        "an id that is remembered has no limit",
        "trainer/wire/methods.py",
        "len(value) > _ID_CHARACTERS:",
        "len(value) > 10**9:",
        bodies("an_id_that_a_server_remembers_is_short"),
    ),
    Mutation(
        "tool calls without a result are remembered for ever",
        "core/tracing/inferred.py",
        "        while len(self._issued) > MOST_OPEN_TOOL_CALLS:",
        "        while False:",
        unit("inferred", "test_tool_calls_without_a_result_are_forgotten"),
    ),
    Mutation(
        "short texts are encoded on the event loop",
        "trainer/gateway/completions.py",
        "turns, most=most, large=True)",
        "turns, most=most)",
        bodies("texts_are_encoded_in_their_applications_turn"),
    ),
    Mutation(
        "an echo is decoded outside its application's turn",
        "trainer/gateway/completions.py",
        "        text = await in_turn(rendering.decode, prompt) + text",
        "        text = rendering.decode(prompt) + text",
        bodies("texts_are_encoded_in_their_applications_turn"),
    ),
    Mutation(
        "requests for tokens have no limit",
        "trainer/gateway/completions.py",
        "    gateway.admit_one(application)\n    try:\n        yield",
        "    gateway._open[application] += 1\n    try:\n        yield",
        bodies("requests_for_tokens_count_as_an_applications_requests"),
    ),
    Mutation(
        "a socket has its whole path",
        "trainer/http/unix_sockets.py",
        "if short else str(path))",
        "if False else str(path))",
        unit("unix_sockets", "test_a_path_may_have_any_length"),
    ),
    Mutation(
        "memory that cannot be counted is none",
        "trainer/graders/programs/inside/supervisor.py",
        "        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):",
        "        if False:",
        (
            "tests/integration/test_attacks_sandbox.py::"
            "test_memory_is_limited_where_the_supervisor_has_no_descriptors_left",
        ),
    ),
    Mutation(
        "the supervisor keeps no descriptors",
        "trainer/graders/programs/inside/supervisor.py",
        "        while len(_spare) < 2:",
        "        while False:",
        (
            "tests/integration/test_attacks_sandbox.py::"
            "test_memory_is_limited_where_the_supervisor_has_no_descriptors_left[none but its own]",
        ),
    ),
    Mutation(
        "a large body is parsed at once",
        "trainer/http/json_pieces.py",
        "    if places.size <= piece:",
        "    if True:",
        unit("json_pieces", "test_no_piece_is_large"),
    ),
    Mutation(
        "a piece without a value is none",
        "trainer/http/json_pieces.py",
        "                if ends.size > 2 and not members.strip(_SPACE):",
        "                if False:",
        unit("json_pieces", "test_text_that_is_no_json_is_refused_as_at_once"),
    ),
    Mutation(
        "a long body is not parsed in pieces",
        "trainer/http/limits.py",
        "    if len(body) >= _PIECES_BYTES:",
        "    if False:",
        bodies("a_long_body_is_parsed_in_pieces"),
    ),
    Mutation(
        "every wrong value of a list is written out",
        "trainer/wire/methods.py",
        "            return Annotated[tuple[self.of(arguments[0], name), ...], Field(fail_fast=True)]",
        "            return Annotated[tuple[self.of(arguments[0], name), ...], Field()]",
        bodies("of_many_wrong_values_few_are_written_out"),
    ),
    Mutation(
        "every field that there is not is written out",
        "trainer/wire/methods.py",
        "    if isinstance(value, Mapping) and len(value) > len(known) + _MOST_ERRORS:",
        "    if False:",
        bodies("of_many_wrong_values_few_are_written_out"),
    ),
    Mutation(
        "a file beside the tests' own reward is paid",
        "guests/environments/agl_environments/harbor_tasks.py",
        "    return min(scores, default=None), said(report)",
        "    return (scores[0] if scores else None), said(report)",
        (
            "tests/integration/test_attacks_rewards.py::test_another_file_beside_the_tests_own_reward_is_not_paid",
            "tests/integration/test_attacks_rewards.py::test_of_two_files_of_the_tests_the_lower_reward_counts",
        ),
    ),
    Mutation(
        "a sandboxed agent chooses the account",
        "trainer/runners/model_requests.py",
        "        elif name in HEADERS or name.startswith(",
        '        elif not name.startswith("x-goog-api-key") or name.startswith(',
        provider("no_header_chooses_another_account"),
    ),
    Mutation(
        "any beta passes",
        "trainer/runners/model_requests.py",
        "if _BETA.fullmatch(beta) or",
        "if beta or",
        provider("betas_that_run_things_are_left_out"),
    ),
    Mutation(
        "any query passes",
        "trainer/runners/model_requests.py",
        "        if known and _QUERY_VALUE.fullmatch(value):",
        "        if True:",
        provider("a_query_has_what_calls_of_models_have"),
    ),
    Mutation(
        "a provider runs tools for a sandboxed agent",
        "trainer/runners/model_requests.py",
        "        elif kind not in _OPENAI_TOOLS:",
        "        elif False:",
        provider("a_provider_does_nothing_for_a_sandboxed_agent_but_answer"),
    ),
    Mutation(
        "a body is looked at and another is sent",
        "guests/harnesses/agl_harnesses/front.py",
        "        return dumps(value), name",
        "        return content, name",
        provider("what_was_looked_at_is_what_is_sent"),
    ),
    Mutation(
        "a policy gets a provider's key",
        "guests/harnesses/agl_harnesses/front.py",
        "            if self.is_policy(name):\n",
        "            if False:\n",
        provider("a_policy_gets_what_the_agent_sends_and_no_key_of_a_provider"),
    ),
    Mutation(
        "a path leads out of a provider's URL",
        "trainer/runners/recording_proxy.py",
        "        if leads_out(path):",
        "        if False:",
        bodies("no_path_leads_out_of_a_providers_url"),
    ),
    Mutation(
        "0.3's proxy passes every call",
        "guests/agentlightning/agl_agentlightning/llm_proxy.py",
        "        if not is_permitted(provider, request.method, path):",
        "        if False:",
        bodies("0_3s_proxy_passes_calls_of_models_alone"),
    ),
    Mutation(
        "a provider's answer has no bound",
        "trainer/runners/recording_proxy.py",
        "            return json_value(text, limits, partial(loads, nan=True))",
        "            return orjson.loads(text)",
        bodies("a_hostile_providers_answer_passes_and_is_recorded_to_a_bound[dense]"),
    ),
    Mutation(
        "texts remembered without redaction",
        "trainer/memory/memory.py",
        "if self.redact is not None:\n            entries",
        "if False:\n            entries",
        unit("memory_store", "test_texts_are_redacted_before_they_are_kept"),
    ),
    Mutation(
        "secrets passed to child processes",
        "trainer/processes/environment.py",
        '_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|HEADERS|COOKIE")',
        '_SECRET = re.compile("NOTHING")',
        unit("child_environment", "test_a_tool_sees_the_allowed_and_the_named"),
    ),
    Mutation(
        "the graded program is told the expected answers",
        "trainer/graders/code.py",
        'job |= {"code": code,',
        'job |= {"code": f"EXPECTED = {tests!r}\\n{code}",',
        unit("graders_code", "test_a_program_is_not_told_what_is_expected"),
    ),
    Mutation(
        "a rollout with many spans is written before the others",
        "trainer/store/sql/store.py",
        "        await asyncio.gather(*map(self._add_spans_in_turn, of_rollouts.values()))",
        "        await self._database.write_each(records.add_spans, spans)",
        ("tests/integration/test_store_conformance.py::test_a_rollout_with_many_spans_takes_turns_with_the_others",),
    ),
    Mutation(
        "a sandbox lets calls through that lead out of it",
        "trainer/processes/bubblewrap.py",
        "        if number >= 0 and library",
        "        if number > 1000 and library",
        ("tests/integration/test_attacks_sandbox.py::test_a_call_that_leads_out_is_refused",),
    ),
    Mutation(
        "what a policy wrote to /logs comes to Harbor's tests",
        "guests/environments/agl_environments/harbor_sandbox.py",
        "for path in (self.workdir, *self.files)})",
        'for path in (self.workdir, *self.files)} | {"logs"})',
        attacks("a_reward_that_the_policy_wrote_is_not_paid[a folder that cannot be emptied]"),
    ),
    Mutation(
        "a link to what only Harbor's tests have comes to them",
        "trainer/graders/programs/inside/copies.py",
        "    return any(place.is_relative_to(folder) for folder in folders)",
        "    return bool(folders)",
        attacks("a_link_to_what_only_the_tests_have_does_not_come_to_them[absolute]"),
    ),
    Mutation(
        "a link may climb out of a folder that another link leads to",
        "trainer/graders/programs/inside/copies.py",
        '    if ".." in dropwhile(',
        '    if "..." in dropwhile(',
        attacks("a_link_to_what_only_the_tests_have_does_not_come_to_them[out of a folder that a link leads to]"),
    ),
    Mutation(
        "a report is believed whatever job it is of",
        "guests/environments/agl_environments/harbor_sandbox.py",
        'if report.get("number") != number:',
        "if not report:",
        attacks("a_reward_without_the_report_of_its_tests_is_an_error"),
    ),
    Mutation(
        "a reward that is no number is the infrastructure's failure",
        "guests/environments/agl_environments/harbor_tasks.py",
        "(ValueError, KeyError, TypeError, OverflowError, RecursionError)",
        "(ValueError, KeyError, TypeError)",
        attacks("what_is_no_number_is_no_reward"),
    ),
    Mutation(
        "a path is copied that fits nowhere else",
        "trainer/graders/programs/inside/copies.py",
        "if size > MOST_PATH_BYTES or depth > MOST_DEPTH:",
        "if not size:",
        attacks("files_left_for_harbors_tests[a long path]"),
    ),
    Mutation(
        "a coding agent's files are unpacked on the loop",
        "guests/harnesses/agl_harnesses/training.py",
        'await loop.run_in_executor(threads, self._unpack, process, copy, job["disk_mb"] << 20)',
        'self._unpack(process, copy, job["disk_mb"] << 20)',
        attacks("files_left_for_a_grader"),
    ),
    Mutation(
        "a sandbox lacks the links to its Python",
        "trainer/processes/bubblewrap.py",
        '            same |= {link: ("--symlink", target) for link, target in _links_to(path).items()}\n',
        '            same |= {link: ("--symlink", to) for link, to in _links_to(path).items() if link in SYSTEM}\n',
        ("tests/integration/test_linked_python.py::test_a_sandbox_has_the_python_that_runs_agl[linked-PythonTests]",),
    ),
    Mutation(
        "what a program left behind is there for the next test",
        "trainer/graders/programs/inside/supervisor.py",
        "        for path in ({folder} | _scratch()) - kept:",
        "        for path in {folder} - kept:",
        ("tests/integration/test_attacks_sandbox.py::test_a_tests_leftovers_are_gone_before_the_next",),
    ),
    Mutation(
        "an answer is evaluated in the process that judges it",
        "trainer/graders/programs/inside/judge.py",
        '    return {"eval": evaluate, "exec": execute}',
        "    return {}",
        ("tests/integration/test_attacks_sandbox.py::test_an_answer_that_is_evaluated_cannot_pass_its_own_test",),
    ),
    Mutation(
        "tokens with advantage 0 are not told apart",
        "trainer/store/sql/runs.py",
        "case((T.c.advantage == 0, T.c.tokens), else_=0)",
        "case((T.c.advantage > 1e9, T.c.tokens), else_=0)",
        ("tests/integration/test_store_conformance.py",),
    ),
    Mutation(
        "a reward out of range is trained",
        "trainer/runners/coordinator.py",
        "not low <= trajectory.reward <= high",
        "False",
        ("tests/integration/test_reward_range.py",),
    ),
    Mutation(
        "what was said before is said again",
        "trainer/report/rollout_report.py",
        "sent[known:]",
        "sent",
        ("tests/integration/test_traces_programs.py::test_what_a_program_of_each_framework_did_can_be_imitated",),
    ),
    Mutation(
        "gradients of trees are not compared",
        "trainer/local/learner/tree_attention.py",
        "for a, b in zip(ours, theirs, strict=True))",
        "for a, b in zip(ours[:1], theirs[:1], strict=True))",
        unit("tree_attention", "test_a_kernel_that_is_wrong_backwards_alone_is_not_used"),
    ),
    Mutation(
        "a padded place is seen",
        "trainer/local/learner/prefix_trees.py",
        "np.arange(size + self.kept) + np.array([[0], [1]])",
        "np.arange(size + self.kept) + np.array([[0], [size]])",
        unit("tree_attention", "test_the_mask_of_a_gpu_is_that_of_the_blocks"),
    ),
    Mutation(
        "kept keys are seen by those before their own",
        "trainer/local/learner/prefix_trees.py",
        "starts[keys] = np.minimum(starts[keys], first)",
        "starts[keys] = 0",
        unit("tree_attention", "test_the_mask_of_a_gpu_is_that_of_the_blocks"),
    ),
    Mutation(
        "what a beginning is used for gives it no gradient",
        "trainer/local/learner/tree_attention.py",
        "[grad for _, grad in pairs])",
        "[0 * grad for _, grad in pairs])",
        unit("learner", "TestEquality::test_a_group_shares_its_prefixes_with_every_objective"),
    ),
    Mutation(
        "a beginning is computed once for the wrong micro-batches",
        "trainer/local/learner/prefix_trees.py",
        "(last - first) * common.size - worth, first, common",
        "common.size - worth, first, common",
        unit("learner", "TestRows::test_what_is_computed_once_is_what_saves_most"),
    ),
    # -- names, reward functions, approvals and equal calls -----------------------------------------------------------
    Mutation(
        "a pattern beats a name",
        "core/mdp/selection.py",
        "            if isinstance(pattern, str) and pattern == agent:\n                return policy\n",
        "            pass\n",
        unit("selection", "test_a_name_is_that_agent_and_no_other"),
    ),
    Mutation(
        "a name that looks like a glob captures others",
        "core/mdp/selection.py",
        "            if not (isinstance(pattern, str) and pattern in self.names) and _matches(pattern, agent):\n",
        "            if _matches(pattern, agent):\n",
        unit("selection", "test_names_with_a_globs_characters"),
    ),
    Mutation(
        "an attempt does not learn its agents' names",
        "core/tracing/context.py",
        "        rollout.selection = known\n",
        "        pass\n",
        unit("selection", "test_an_attempt_knows_its_agents_as_soon_as_they_begin"),
    ),
    Mutation(
        "an agent that a glob captured is trained",
        "core/mdp/builder.py",
        "    if trajectory.misrouted:\n",
        "    if False:\n",
        unit("trajectories", "test_an_agent_that_was_taken_for_one_of_a_glob_is_not_trained"),
    ),
    Mutation(
        "leases do not know the names that were seen",
        "trainer/runners/coordinator.py",
        "self.selection = self.selection.knowing([",
        "_ = ([",
        (
            "tests/integration/test_selection_end_to_end.py::test_a_name_with_a_globs_characters_is_that_agent_and_a_name_of_nobody_ends_the_run",
        ),
    ),
    Mutation(
        "a name of nobody ends a run without a word",
        "trainer/algorithms/loop.py",
        "            workplace.require_agents()\n",
        "            pass\n",
        (
            "tests/integration/test_selection_end_to_end.py::test_a_name_with_a_globs_characters_is_that_agent_and_a_name_of_nobody_ends_the_run",
        ),
    ),
    Mutation(
        "AIR's filters read names as globs",
        "core/rewards/air.py",
        "[rule.knowing(agents, tools) for rule in self._rules.values()]",
        "[*self._rules.values()]",
        unit("air", "test_a_filter_by_a_name_is_for_that_tool_and_that_agent_alone"),
    ),
    Mutation(
        "a reward gets its arguments by place alone",
        "core/rewards/arguments.py",
        "        taken = {p.name: p.name for p in own if p.name in values}\n",
        "        taken: dict[str, str] = {}\n",
        unit("reward_arguments", "test_names_decide_in_every_order"),
    ),
    Mutation(
        "a reward's names may contradict their places",
        "core/rewards/arguments.py",
        "        if _contradicts(names, taken, values):\n",
        "        if False:\n",
        unit("reward_arguments", "test_what_contradicts_itself_is_refused_before_anything_runs"),
    ),
    Mutation(
        "one name that is the other value's stands in its place",
        "core/rewards/arguments.py",
        "[values[1], None], [None, values[0]], ",
        "",
        unit("reward_arguments", "test_what_contradicts_itself_is_refused_before_anything_runs"),
    ),
    Mutation(
        "an enumeration hides that a tool failed",
        "core/messages/tool_output.py",
        "        return _plain(value.value)\n",
        "        return str(value)\n",
        unit("tool_output", "test_what_says_that_the_tool_failed"),
    ),
    Mutation(
        "a tool that a guardrail refuses has succeeded",
        "adapters/openai_agents/tracer.py",
        "            if refusal is not None and self._open and",
        "            if False and",
        ("tests/integration/test_refused_calls.py::test_a_tool_that_a_guardrail_of_the_agents_sdk_refuses",),
    ),
    Mutation(
        "a tool that waits for a person has run",
        "core/mdp/spans.py",
        "self.operation == semconv.EXECUTE_TOOL and not self.attributes.get(semconv.PAUSED)",
        "self.operation == semconv.EXECUTE_TOOL",
        _AWAITED,
    ),
    Mutation(
        "a tool of the Agents SDK that waits has run",
        "adapters/openai_agents/tracer.py",
        "                semconv.PAUSED: opened.paused or None,\n",
        "",
        _AWAITED,
    ),
    Mutation(
        "an agent that is a tool and waits has run",
        "adapters/openai_agents/tracer.py",
        "            if self._open and (opened := self.get(get_current_span())) is not None:\n",
        "            if False:\n",
        ("tests/integration/test_openai_agents.py::test_an_agent_that_is_a_tool_has_not_run_while_somebody_is_asked",),
    ),
    Mutation(
        "equal calls of the Agents SDK swap their results",
        "adapters/openai_agents/tracer.py",
        "                opened.call_id = tool_call_id\n",
        "                pass\n",
        _EQUAL_CALLS,
    ),
    Mutation(
        "a tool of Pydantic AI that waits has run",
        "adapters/pydantic_ai/tracer.py",
        "tracing.end(scope, attributes={semconv.PAUSED: True})",
        "tracing.end(scope)",
        _AWAITED,
    ),
    Mutation(
        "what a person refuses in ag2 has succeeded",
        "adapters/autogen/ag2.py",
        "failed=refused)",
        "failed=False)",
        _AWAITED,
    ),
    Mutation(
        "a deep agent's nodes are agents",
        "adapters/langchain/labels.py",
        'frozenset({"langchain_create_agent", "deepagents"})',
        'frozenset({"langchain_create_agent"})',
        ("tests/integration/test_langgraph.py::test_an_unnamed_deep_agent_has_the_name_around_it",),
    ),
    Mutation(
        "two modules of a package are one agent",
        "trainer/runners/command.py",
        "            module = option[1] or next(words, None) or module\n",
        "            pass\n",
        unit("program_names", "test_two_modules_of_a_package_are_two_agents"),
    ),
    Mutation(
        "an agent's name ends at a line break",
        "trainer/http/agent_name.py",
        "(?s:.*)",
        ".*",
        unit("gateway", "test_an_agent_is_called_what_it_is_called"),
    ),
    Mutation(
        "a package manager's name is its programs'",
        "trainer/runners/command.py",
        "return module or _launched(command) or",
        "return module or",
        unit("program_names", "test_a_command_is_called_after_its_program"),
    ),
    Mutation(
        "code is taken for a script's name",
        "trainer/runners/command.py",
        "            next(words, None)\n        elif",
        "            pass\n        elif",
        unit("program_names", "test_a_command_is_called_after_its_program"),
    ),
    Mutation(
        "agents of one name go unnoticed",
        "trainer/report/namesakes.py",
        "if len(texts) > 1}",
        "if len(texts) > 9}",
        (
            "tests/integration/test_selection_end_to_end.py::test_a_dry_run_names_agents_of_one_name_and_names_of_nobody",
        ),
    ),
    # -- evaluation ---------------------------------------------------------------------------------------------------
    Mutation(
        "interval of success too narrow",
        "trainer/report/statistics.py",
        "half = z * np.sqrt(p * (1 - p) / effective",
        "half = 0.9 * z * np.sqrt(p * (1 - p) / effective",
        unit("evaluation_statistics"),
    ),
    Mutation(
        "interval of the mean too narrow",
        "trainer/report/statistics.py",
        "mean, half = values.mean(-1), t_quantile(n - 1) * _standard_error(values, unit)",
        "mean, half = values.mean(-1), 1.5 * _standard_error(values, unit)",
        unit("evaluation_statistics"),
    ),
    Mutation(
        "pass@k of k draws with replacement",
        "trainer/report/statistics.py",
        "return 1.0 - _all_of_k(n, np.asarray(n) - successes, k)",
        "return 1.0 - (1.0 - successes / np.asarray(n)) ** k",
        unit("evaluation_statistics", "test_pass_at_k_is_the_share_of_all_choices"),
    ),
    Mutation(
        "the last batch of the epochs is full",
        "trainer/run/batches.py",
        "return min(self.batch_size, max(0, remaining))",
        "return self.batch_size",
        unit("batches", "test_an_epoch_has_each_task_once_and_only_the_last_batch_may_be_smaller"),
    ),
    Mutation(
        "a batch holds a task of two epochs",
        "trainer/run/batches.py",
        "others = permutation[~np.isin(permutation, of_begun_batch)]",
        "others = permutation",
        unit("batches", "test_a_batch_of_a_run_without_end_holds_no_task_twice"),
    ),
    Mutation(
        "dynamic sampling fills the last step of the epochs",
        "trainer/algorithms/policy_gradient.py",
        "missing = size - (n_tasks - useless)",
        "missing = self.batch_size - (n_tasks - useless)",
        ("tests/integration/test_epochs.py::test_dynamic_sampling_replaces_no_more_tasks_than_the_last_step_has",),
    ),
    Mutation(
        "rollouts that run ahead overrun the epochs",
        "trainer/algorithms/ahead.py",
        "return ended[: size(step)] if len(ended) >= size(step) else None",
        "return ended[: size(0)] if len(ended) >= size(0) else None",
        unit("ahead", "test_the_last_step_of_epochs_has_the_groups_that_are_left"),
    ),
    Mutation(
        "a group that failed whole is not dropped",
        "trainer/run/results.py",
        "len((groups - succeeded) | worth.dropped_groups)",
        "len(worth.dropped_groups)",
        ("tests/integration/test_counts.py::test_the_counts_of_a_step_are_those_of_the_database",),
    ),
    Mutation(
        "a group with nothing to compare had equal returns",
        "trainer/objectives/advantages.py",
        "zero_variance_groups=frozenset(compared_groups - unequal)",
        "zero_variance_groups=frozenset(groups - unequal)",
        unit("advantages", "test_a_group_has_equal_returns_if_all_that_is_compared_in_it_has"),
    ),
    Mutation(
        "a rollout with an advantage of 0 counts as trained",
        "trainer/algorithms/trained_calls.py",
        "for row in rows[name] if learns([row])}",
        "for row in rows[name]}",
        ("tests/integration/test_counts.py::test_the_counts_of_a_step_are_those_of_the_database",),
    ),
    Mutation(
        "a resumed step forgets the attempts that failed before",
        "trainer/run/resume.py",
        "failures = await stored_failures(self.store, old)",
        "failures = ()",
        ("tests/integration/test_counts.py::test_a_resumed_step_counts_what_the_stopped_run_had_seen",),
    ),
    Mutation(
        "SIGTERM ends the program at once",
        "core/stop_signals.py",
        "STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)",
        "STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP)",
        unit("stop_signals", "test_a_coroutine_is_cancelled_by_each_of_them_and_ends_whatever_else_comes"),
    ),
    Mutation(
        "what user code forks does not end by SIGTERM",
        "core/stop_signals.py",
        "os.register_at_fork(after_in_child=_restore)\n",
        "",
        unit("stop_signals", "test_a_child_that_user_code_forks_ends_by_sigterm"),
    ),
    Mutation(
        "programs of a worker do not heed SIGTERM",
        "core/stop_signals.py",
        "            _replace(number, lambda *_: None)\n",
        "            signal.signal(number, signal.SIG_IGN)\n",
        unit("stop_signals", "test_a_process_that_does_not_heed_them_executes_programs_that_do"),
    ),
    Mutation(
        "a handler of the user's leaves a run behind",
        "trainer/http/aio.py",
        "        except BaseException as raised:  # by a handler of the user's\n",
        "        except KeyboardInterrupt as raised:  # by a handler of the user's\n",
        unit("stop_signals", "test_a_handler_of_the_users_that_exits_does_so_when_all_has_ended"),
    ),
    Mutation(
        "a run on the user's own loop does not heed SIGTERM",
        "trainer/run/trainer.py",
        "                loop.call_soon_threadsafe(task.cancel)\n",
        "                pass\n",
        unit("stop_signals", "test_a_run_on_the_users_own_loop_ends_too"),
    ),
    Mutation(
        "a second signal interrupts what is being saved",
        "trainer/http/aio.py",
        'if _unhurried[state["loop"]]:',
        'if len(received) < 2 and _unhurried[state["loop"]]:',
        unit("stop_signals", "test_what_is_being_finished_is_waited_for_however_long_it_takes"),
    ),
    Mutation(
        "an update that was stopped is lost",
        "trainer/algorithms/loop.py",
        """    kept.unrecorded = entry
    kept.unsaved = step + 1
""",
        """    kept.unrecorded = entry
""",
        ("tests/integration/test_stopped_runs.py::test_a_run_that_is_stopped_anywhere_equals_one_never_stopped",),
    ),
    Mutation(
        "what torch imports at the exit changes the status of a stopped program",
        "trainer/http/aio.py",
        """        _keep_exit_status()
        cause""",
        """        cause""",
        ("tests/integration/test_stopped_runs.py::test_what_torch_imports_as_a_program_exits_leaves_its_exit_status",),
    ),
    Mutation(
        "a policy that goes on gets a tokenizer that its weights do not know",
        "trainer/quickstart/policy.py",
        "            tokenizer, model = _saved(Path(start))\n",
        "            tokenizer, model = build_tokenizer(corpus, vocabulary, words), _saved(Path(start))[1]\n",
        ("tests/unit/test_tiny_policy.py::test_it_goes_on_with_the_tokenizer_of_its_weights",),
    ),
    Mutation(
        "a stop cuts off rollouts whose weights are not saved",
        "trainer/algorithms/loop.py",
        "                    await finish(_end_of_ahead(run, ahead))\n",
        "                    pass\n",
        ("tests/integration/test_stopped_runs.py::test_rollouts_that_run_ahead_end_under_the_weights_that_began_them",),
    ),
    Mutation(
        "a value of another type is read from a store's file",
        "trainer/store/sql/codec.py",
        "        if kinds not in self._good:\n",
        "        if False:\n",
        ("tests/integration/test_attacks_store_file.py::test_every_command_reads_it_or_says_what_is_wrong",),
    ),
    Mutation(
        "a time that no calendar has is read from a store's file",
        "trainer/store/sql/codec.py",
        "        for i in self._times:\n",
        "        for i in ():\n",
        ("tests/integration/test_attacks_store_file.py::test_every_command_reads_it_or_says_what_is_wrong",),
    ),
    Mutation(
        "a span of the year 3,000 billion is stored",
        "trainer/store/sql/codec.py",
        '    require_time(span.start, "the start of a span", **where)\n',
        "",
        ("tests/integration/test_store_conformance.py::test_a_span_of_no_time_is_refused_as_it_is_written",),
    ),
    Mutation(
        "a number of protobuf's has no end",
        "trainer/http/protobuf.py",
        "        if shift >= 7 * MOST_BYTES:\n",
        "        if False:\n",
        ("tests/integration/test_attacks_bodies.py::test_protobuf_is_counted_as_it_is_written",),
    ),
    Mutation(
        "the proxy of 0.3's ends in an error where a path has no key",
        "guests/agentlightning/agl_agentlightning/llm_proxy.py",
        '        given = "".join(parts[1:2]).encode(errors="backslashreplace")\n',
        '        given = parts[1].encode(errors="backslashreplace") if parts[0] == "keys" else b""\n',
        ("tests/unit/test_compat_proxy.py::test_a_path_that_names_nothing_is_answered",),
    ),
    Mutation(
        "a trainer needs a database's library before it has a database",
        "trainer/store/sql/codec.py",
        "_ESCAPE = ",
        "from agl.trainer.store.sql import schema as schema\n\n_ESCAPE = ",
        ("tests/unit/test_import.py::test_a_trainer_loads_no_database_before_it_has_one",),
    ),
    Mutation(
        "a run that fails saves nothing",
        "trainer/algorithms/loop.py",
        "if kept.unsaved is not None and not isinstance(error, StalePolicyError | CheckpointError):",
        "if False:",
        ("tests/integration/test_stopped_runs.py::test_a_run_that_fails_saves_the_steps_before",),
    ),
    Mutation(
        "every model has the rate of the largest",
        "trainer/local/rates.py",
        "rates = next(rates for rates in USUAL_RATES if parameters < rates.below)",
        "rates = USUAL_RATES[-1]",
        unit("rates", "test_it_depends_on_size_adapter_and_loss"),
    ),
    Mutation(
        "an adapter has the rate of all weights",
        "trainer/local/worker.py",
        "lora=spec.lora is not None",
        "lora=False",
        ("tests/integration/test_usual_rates.py::test_the_rate_is_that_of_the_table",),
    ),
    Mutation(
        "a held-out reward has to leave both intervals to have fallen",
        "trainer/report/alerts.py",
        "> wider * math.hypot(lower_half, upper_half)",
        "> wider * (lower_half + upper_half)",
        unit("alerts", "test_what_looks_wrong"),
    ),
    Mutation(
        "many validations are as many chances of a false alarm",
        "trainer/report/alerts.py",
        "    pairs = validations * (validations - 1) / 2\n",
        "    pairs = 1\n",
        unit("alerts", "test_a_policy_that_does_not_change_has_seldom_lost_held_out_reward"),
    ),
    # -- what is saved is what was trained: embeddings under adapters -------------------------------------------------
    Mutation(
        "an adapter on one of two tied embeddings is merged into both",
        "trainer/local/model.py",
        "    untie(model)\n",
        "",
        _ANY_LAYER,
    ),
    Mutation(
        "tied embeddings are left apart, and the configuration says that they are one",
        "trainer/local/embeddings.py",
        "        config.tie_word_embeddings = False\n",
        "        pass\n",
        saved("embeddings_that_an_adapter_has_parted_are_declared_so"),
    ),
    Mutation(
        "only an adapter of the output layer unties",
        "trainer/local/embeddings.py",
        "    by_lora = any(isinstance(module, BaseTunerLayer) for module in (embedding, head))\n",
        "    by_lora = isinstance(head, BaseTunerLayer)\n",
        _ANY_LAYER,
    ),
    Mutation(
        "rows of added tokens are frozen under LoRA",
        "trainer/local/embeddings.py",
        "        trainable_token_indices=embeddings.trained_rows(lora),\n",
        "",
        _ENDS,
    ),
    Mutation(
        "rows of added tokens of an output layer of its own are frozen",
        "trainer/local/embeddings.py",
        "for name in self.names if name not in targeted}",
        "for name in self.names[:1] if name not in targeted}",
        saved("rows_of_added_tokens_are_trained_next_to_any_adapter[llama-untied]"),
    ),
    Mutation(
        "a prepared model does not say which tokens were added",
        "trainer/local/conversion.py",
        "    setattr(model.config, ADDED_TOKENS,",
        "    setattr(model, ADDED_TOKENS,",
        _ENDS,
    ),
    Mutation(
        "an added end of a turn begins as the mean of its text",
        "trainer/local/conversion.py",
        "            alike = (end if token in stops else []) or known",
        "            alike = known",
        saved("added_tokens_begin_as_tokens_of_like_use"),
    ),
    Mutation(
        "a row of two policies' batch is looked up in the other one's trained rows",
        "trainer/local/lora.py",
        "isinstance(module, (LoraLayer, TrainableTokensWrapper))",
        "isinstance(module, LoraLayer)",
        _TWO,
    ),
    Mutation(
        "the copy that samples shares the trained rows of the other policy",
        "trainer/local/worker.py",
        "not p.requires_grad and id(p) not in adapters}",
        "not p.requires_grad}",
        _TWO_STALE,
    ),
    Mutation(
        "trained rows of an embedding that is scaled are not",
        "trainer/local/embeddings.py",
        '        scale = getattr(layer, "embed_scale", 1.0)',
        "        scale = 1.0",
        saved("rows_of_added_tokens_are_trained_next_to_any_adapter[gemma3_text-tied]"),
    ),
    Mutation(
        "trained rows of an output layer lose its bias",
        "trainer/local/embeddings.py",
        "bias_K = None if layer.bias is None else layer.bias[self.ids_K]",
        "bias_K = None",
        saved("rows_of_added_tokens_are_trained_next_to_any_adapter[phi-tied]"),
    ),
    Mutation(
        "vLLM gets the adapter alone where it changes an embedding",
        "trainer/local/model.py",
        "    if adapter is not None and not changes_embeddings(policy.model):\n",
        "    if adapter is not None:\n",
        _FOR_VLLM,
    ),
    Mutation(
        "vLLM is started with an adapter on one of two tied embeddings",
        "trainer/local/worker.py",
        "        _require_adapters(specs)\n",
        "",
        saved("what_vllm_cannot_serve_is_refused_before_any_weight_is_loaded"),
    ),
    Mutation(
        "what verl saved of a model with an adapter is published in peft's names",
        "guests/verl/agl_verl/adapters.py",
        "    if not (folder / _META).is_file():\n",
        "    if True:\n",
        saved("an_adapter_that_verl_trained_is_merged[llama-tied]"),
    ),
    Mutation(
        "verl adapts an output layer that vLLM has no adapters for",
        "guests/verl/agl_verl/config/checks.py",
        "    check_targets(plan)\n",
        "",
        ("tests/integration/test_verl_compose.py::test_adapters_of_embeddings_are_refused",),
    ),
    Mutation(
        "verl trains adapters on a model whose added tokens stay as they began",
        "guests/verl/agl_verl/algorithm.py",
        "        check_tokens(plan, directory)\n",
        "",
        ("tests/integration/test_verl_compose.py::test_adapters_on_tokens_that_a_template_added_are_refused",),
    ),
    Mutation(
        "an adapter whose base nobody has is pushed",
        "trainer/run/hub.py",
        "        _require_known_tokens(files)\n",
        "        pass\n",
        ("tests/integration/test_push.py::test_what_is_no_policy_is_not_pushed",),
    ),
    # -- policies for applications ------------------------------------------------------------------------------------
    Mutation(
        "any key is an application's",
        "trainer/http/application_keys.py",
        "        return found[0] if found else None\n",
        "        return found[0] if found else APPLICATION\n",
        unit("application", "test_a_wrong_key_is_401_in_each_apis_form"),
    ),
    Mutation(
        "a page of another site reaches a server without keys",
        "trainer/gateway/http.py",
        '    in_query |= {"origin": page} if (page := request.headers.get("origin")) else {}\n',
        "",
        unit("application", "test_without_keys_everyone_on_this_machine_is_answered_but_no_web_page"),
    ),
    Mutation(
        "an unknown model is the first of several",
        "trainer/gateway/application.py",
        "        if len(self.models) == 1:\n",
        "        if self.models:\n",
        unit("application", "test_several_policies_are_asked_by_their_names"),
    ),
    Mutation(
        "the model that a request names is not heeded",
        "trainer/gateway/http.py",
        "            pending.policy = gateway.policy_named(_model(request, dialect_request), pending.policy)\n",
        "",
        unit("application", "test_several_policies_are_asked_by_their_names"),
    ),
    Mutation(
        "an application's conversation begins anew with each request",
        "trainer/gateway/application.py",
        "conversation = found if found is not None and found.request_count < CALLS else begun",
        "conversation = begun",
        unit("application", "test_a_conversation_continues_its_tokens_and_is_one_rollout"),
    ),
    Mutation(
        "an application continues another's responses",
        "trainer/gateway/application.py",
        "self._responses.setdefault(application, RecentResponses())",
        'self._responses.setdefault("", RecentResponses())',
        unit("application", "test_a_response_is_continued_by_its_id_by_its_application_alone"),
    ),
    Mutation(
        "conversations of applications are kept for ever",
        "trainer/gateway/application.py",
        "        while len(self._conversations) > CONVERSATIONS:\n",
        "        while False:\n",
        unit("application", "test_what_is_remembered_is_bounded"),
    ),
    Mutation(
        "an application has no limit",
        "trainer/gateway/application.py",
        "        if self._open[application] >= self.most_requests:\n",
        "        if False:\n",
        unit("application", "test_an_application_beyond_its_limit_gets_429_and_others_do_not"),
    ),
    Mutation(
        "a bad request takes a place of its application for ever",
        "trainer/gateway/application.py",
        "        self.ended(pending.agent)\n        self.metrics.refused(",
        "        self.metrics.refused(",
        unit("application", "test_an_application_beyond_its_limit_gets_429_and_others_do_not"),
    ),
    Mutation(
        "an application's seed is not heeded",
        "trainer/gateway/application.py",
        "        if not agent_seed:\n",
        "        if True:\n",
        unit("application", "test_the_same_seed_gives_the_same_sampling"),
    ),
    Mutation(
        "a recorded conversation never ends, so nothing trains on it",
        "trainer/launch/recording.py",
        'update_attempt(call.rollout_id, call.attempt, "succeeded")',
        'update_attempt(call.rollout_id, call.attempt, "running")',
        unit("application", "test_an_application_gets_its_answers_while_they_cannot_be_recorded"),
    ),
    Mutation(
        "a server forgets the limits that its environment sets",
        "trainer/processes/environment.py",
        ', "AGL_LIMIT_*")',
        ")",
        unit("child_environment", "test_the_users_own_program_sees_all_but_agls"),
    ),
    Mutation(
        "two applications share a key",
        "trainer/http/application_keys.py",
        "        if digest in hashes.values():\n",
        "        if False:\n",
        unit("application", "test_a_key_file_with_a_mistake_is_refused"),
    ),
    Mutation(
        "open answers are cut when the server is stopped",
        "trainer/launch/serve.py",
        "await asyncio.shield(server.died)",
        "await server.died",
        (
            "tests/integration/test_serve_policies.py::"
            "test_two_policies_for_two_applications_whose_calls_are_trained_on",
        ),
    ),
    Mutation(
        "an echo's log-probs are those of other places",
        "trainer/gateway/completions.py",
        "entries.add, prompt[:1], prompt[1:], values, pairs)",
        "entries.add, prompt[:1], prompt[1:], values[::-1], pairs)",
        unit("text_completions", "test_an_echo_has_the_prompt_with_its_log_probs"),
    ),
    Mutation(
        "a text completion goes on after its stop text",
        "trainer/gateway/completions.py",
        "        return text[: min(ends)] if ends else text\n",
        "        return text\n",
        unit("text_completions", "test_a_stop_text_ends_the_text_and_is_not_in_it"),
    ),
    Mutation(
        "an adapter alone is served as its base",
        "trainer/local/conversion.py",
        "return tokenizer, model.merge_and_unload()",
        "return tokenizer, model.unload()",
        ("tests/integration/test_prepared_models.py::test_an_adapter_alone_is_merged_into_the_base_that_it_names",),
    ),
    Mutation(
        "the most likely tokens of a prompt are a place late",
        "trainer/local/engine/engine.py",
        "        return chosen_T, top_ids_TK.astype(np.int32), top_TK\n",
        "        return chosen_T, np.roll(top_ids_TK, 1, 0).astype(np.int32), top_TK\n",
        unit("engine", "test_a_scored_prompt_has_the_most_likely_tokens_of_each_place"),
    ),
)


def source_of(file: str) -> str:
    """A test file, with the conformance suite where a class of the file is one."""
    source = (ROOT / file).read_text(encoding="utf-8")
    if "(Conformance)" not in source:
        return source
    return "".join([source, *(path.read_text(encoding="utf-8") for path in CONFORMANCE)])


def misplaced(mutations: Sequence[Mutation] = MUTATIONS) -> list[str]:
    """What is wrong with the rows: a file or test that is not there, or a text that does not occur exactly once."""
    wrong = []
    for each in mutations:
        path = ROOT / each.file
        found = path.read_text(encoding="utf-8").count(each.old) if path.is_file() else None
        if found != 1:
            where = "there is no such file" if found is None else f"its old text occurs {found} times"
            wrong.append(f"{each.name}: {each.file}: {where}")
        for test in each.tests:
            file, *names = test.split("::")
            if names and f"def {names[-1].partition('[')[0]}(" not in source_of(file):
                wrong.append(f"{each.name}: there is no test {test}")
    names = [each.name for each in mutations]
    wrong += [f"{name}: there are two of this name" for name in sorted({n for n in names if names.count(n) > 1})]
    return wrong


@contextmanager
def planted(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The tree with the fault in it."""
    path = tree / mutation.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(whole, encoding="utf-8")


def copy(tree: Path) -> None:
    """Put what git knows of the tree, and what is new in it, into a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or source.is_file():
            shutil.copy2(source, target, follow_symlinks=False)


def run(tests: Sequence[str], tree: Path) -> tuple[int, str]:
    """pytest's exit status and the end of what it printed, of those tests that .ci/run runs."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=line",
        "-m", "not night", *tests,
    ]  # fmt: skip
    # Compiled files are told apart by size and time: a fault of the same length within a second would not be seen.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "AGL_TEST_SHARED": str(tree / "shared")}
    env.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"no end after {TIMEOUT} s"
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options.add_argument("--list", action="store_true", help="name the faults, and check that each has its place")
    given = options.parse_args()
    if unknown := {*given.only} - {each.name for each in MUTATIONS}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [each for each in MUTATIONS if not given.only or each.name in given.only]
    wrong = misplaced()
    for line in wrong:
        print(f"MISPLACED {line}", flush=True)
    if given.list:
        for each in chosen:
            print(f"{each.name}: {each.file}; caught by {', '.join(each.tests)}")
    if given.list or wrong:
        return 1 if wrong else 0
    bad = 0
    with tempfile.TemporaryDirectory(prefix="agl-mutations-") as folder:
        tree = Path(folder)
        copy(tree)
        passes: dict[tuple[str, ...], bool] = {}
        for each in chosen:
            began = time.monotonic()
            if each.tests not in passes:
                code, said = run(each.tests, tree)
                passes[each.tests] = code == 0
                if code:
                    print(f"without a fault these tests do not pass: {' '.join(each.tests)}\n{said}", flush=True)
            with planted(each, tree):
                code, said = run(each.tests, tree)
            verdict = "caught" if code == 1 and passes[each.tests] else "SURVIVED" if code == 0 else "NOT RUN"
            bad += verdict != "caught"
            print(f"{verdict:8} {each.name} ({time.monotonic() - began:.0f} s)", flush=True)
            if verdict == "NOT RUN":
                print(said, flush=True)
            elif verdict == "caught":
                failed = [line for line in said.splitlines() if line.startswith("FAILED")]
                print("".join(f"         {line[:150]}\n" for line in failed[:1]), end="", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults were caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
