"""The quickstart's tiny policy: reproducible, small, append-only in its format, and never shown a held-out problem."""

import hashlib
import json
import random
import runpy

import pytest
import real_data
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from renderers.base import ToolCallParseStatus  # noqa: E402
from renderers.parsers import get_tool_parser  # noqa: E402

from agl.errors import ConfigError, DatasetError  # noqa: E402
from agl.trainer.local.gguf_tokenizer import QWEN2  # noqa: E402
from agl.trainer.quickstart import demos, tasks  # noqa: E402
from agl.trainer.quickstart.policy import Recipe, Stage, make_policy  # noqa: E402
from agl.trainer.quickstart.tokenizer import NAMES, WORDS, build_tokenizer  # noqa: E402

QUICK = Recipe(capability_steps=4, mixed_steps=2, rows=2, row_tokens=128, warmup_steps=2)
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "...", "parameters": {}}}]
EXAMPLE = ROOT / "examples" / "gsm8k_arithmetic"
GSM8K = real_data.ROOT / "gsm8k"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy") / "tiny"
    return make_policy(directory, seed=3, threads=1, recipe=QUICK)


def _digests(directory):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def _render(tokenizer, messages, generate=False):
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=generate)


def _conversation(answer="1692", arguments: object = '{"expression": "47 * 36"}'):
    return [
        {"role": "system", "content": demos.SYSTEM_PROMPT},
        {"role": "user", "content": "What is 47 * 36?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def test_the_same_seed_makes_the_same_files(policy, tmp_path):
    before = torch.random.get_rng_state(), torch.get_num_threads()
    again = make_policy(tmp_path / "again", seed=3, threads=1, recipe=QUICK)
    other = make_policy(tmp_path / "other", seed=4, threads=1, recipe=QUICK)
    assert _digests(again.directory) == _digests(policy.directory)
    assert _digests(other.directory)["model.safetensors"] != _digests(policy.directory)["model.safetensors"]
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == torch.get_num_threads()


def test_it_is_a_small_hugging_face_directory(policy, tokenizer):
    assert policy.parameters < 3_000_000
    assert sum(file.stat().st_size for file in policy.directory.iterdir()) < 4 * 2**20
    assert json.loads((policy.directory / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    loaded = transformers.AutoTokenizer.from_pretrained(policy.directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy.directory)
    text = "What is 47 * 36? <tool_call>\n<|im_end|> é"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat_template == tokenizer.chat_template
    assert model.config.model_type == "llama"
    assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")
    assert model.config.vocab_size >= len(loaded)


def test_progress_reports_each_stage_and_the_loss_falls(tmp_path):
    seen = []
    recipe = Recipe(capability_steps=25, mixed_steps=2, rows=4, row_tokens=128, warmup_steps=5)
    report = make_policy(tmp_path / "p", threads=1, recipe=recipe, progress=lambda *event: seen.append(event))
    assert [event[:3] for event in seen] == [
        *(("capability", step, 25) for step in range(1, 26)),
        ("mixed quality", 1, 2),
        ("mixed quality", 2, 2),
    ]
    assert report.loss == seen[-1][3]
    assert report.steps == 27
    assert seen[24][3] < seen[0][3] / 2


def test_it_goes_on_from_another_with_demonstrations_of_ones_own(policy, tmp_path):
    drawn = []

    def demonstrate(rng):
        drawn.append(rng.random())
        return (demos.Turn(demos.opening("Write 4.", "Write.", ()), "4<|im_end|>"),)

    stages = [Stage("writing", demonstrate, 3)]
    report = make_policy(tmp_path / "on", threads=1, recipe=QUICK, stages=stages, start=policy.directory)
    made = make_policy(tmp_path / "same", threads=1, recipe=QUICK, stages=[], start=policy.directory)
    assert (report.steps, made.steps) == (3, 0)
    assert len(drawn) > 3
    assert _digests(made.directory)["model.safetensors"] == _digests(policy.directory)["model.safetensors"]
    assert _digests(report.directory)["model.safetensors"] != _digests(policy.directory)["model.safetensors"]


def test_it_goes_on_with_the_tokenizer_of_its_weights(policy, tmp_path):
    made = make_policy(tmp_path / "same", threads=1, recipe=QUICK, stages=[], start=policy.directory, words=QWEN2)
    whole = {"tokenizer.json", "chat_template.jinja"}
    before, after = _digests(policy.directory), _digests(made.directory)
    assert {name: after[name] for name in whole} == {name: before[name] for name in whole}
    assert made.vocabulary == policy.vocabulary


def test_a_name_is_the_same_tokens_with_and_without_a_space_before_it():
    def of(words: str) -> tuple[list[int], list[int]]:
        tokenizer = build_tokenizer(['ask for Be-ra: {"query": "Be-ra"}'], words=words)
        name, behind_space = tokenizer.encode("Be-ra"), tokenizer.encode("for Be-ra")
        assert tokenizer.decode(behind_space) == "for Be-ra"
        return name, behind_space[-len(name) :]

    name, behind_space = of(NAMES)
    assert name == behind_space
    name, behind_space = of(WORDS)
    assert name != behind_space


def test_a_prompt_without_tools_reads_as_the_template_renders_it(tokenizer):
    messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": "Write 4."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert demos.opening("Write 4.", "Write.", ()) == rendered


@pytest.mark.parametrize("place", ["taken", "taken/policy"])
def test_a_policy_is_not_saved_over_or_under_a_file(place, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="needs a folder"):
        make_policy(tmp_path / place, recipe=QUICK)


def test_rows_too_short_for_a_demonstration_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not fit into a row of 32"):
        make_policy(tmp_path / "p", recipe=Recipe(row_tokens=32))
    assert not (tmp_path / "p").exists()


def test_the_template_is_append_only(tokenizer):
    messages = [*_conversation(), {"role": "user", "content": "And 5 - 8?"}, *_conversation("-3")[2:]]
    for n in range(1, len(messages)):
        shorter, longer = _render(tokenizer, messages[:n]), _render(tokenizer, messages[: n + 1])
        assert longer.startswith(shorter)
        if messages[n]["role"] == "assistant":
            assert longer.startswith(_render(tokenizer, messages[:n], generate=True))


def test_a_demonstration_reads_as_the_template_renders_it(tokenizer):
    rendered = _render(tokenizer, _conversation())
    call = demos.tool_call("47 * 36") + "<|im_end|>"
    assert rendered == (
        demos.opening("What is 47 * 36?", demos.SYSTEM_PROMPT) + call + demos.tool_result("1692") + "1692<|im_end|>\n"
    )
    assert _render(tokenizer, _conversation(arguments={"expression": "47 * 36"})) == rendered
    without_system = _conversation()[1:]
    assert _render(tokenizer, without_system).startswith(demos.opening("What is 47 * 36?", ""))


def test_pieces_tokenise_to_what_the_whole_tokenises_to(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        turns = demos.demonstrate(rng, demos.MIXED)
        pieces = [text for turn in turns for text in (turn.prompt, turn.answer)]
        ids = [i for text in pieces for i in tokenizer.encode(text, add_special_tokens=False)]
        assert ids == tokenizer.encode("".join(pieces), add_special_tokens=False)
        assert tokenizer.decode(ids) == "".join(pieces)


def test_template_takes_content_parts_several_calls_and_text_before_a_call(tokenizer):
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": "Twice.", "tool_calls": [call, call]},
    ]
    text = demos.tool_call("1 + 1")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        f"<|im_start|>assistant\nTwice.\n{text}\n{text}<|im_end|>\n"
    )  # fmt: skip


def test_the_hermes_parser_reads_good_and_broken_calls(tokenizer):
    parser = get_tool_parser("qwen3", tokenizer)
    good = demos.tool_call("47 * 36")
    content, calls = parser.extract(tokenizer.encode(good, add_special_tokens=False))
    assert content == []
    assert [(c.name, c.arguments, c.status) for c in calls] == [
        ("calculator", {"expression": "47 * 36"}, ToolCallParseStatus.OK)
    ]
    _, broken = parser.extract(tokenizer.encode(good.replace("}}", "}"), add_special_tokens=False))
    assert broken[0].status is ToolCallParseStatus.INVALID_JSON


def test_markers_are_single_tokens_that_stay_in_the_text(tokenizer):
    for text in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1
    ids = tokenizer.encode("<tool_call>7</tool_call><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>7</tool_call>"


def test_an_episode_is_short(tokenizer):
    longest = _conversation("99980001", {"expression": "9999 * 9999"})
    longest[1]["content"] = "What is 9999 * 9999?"
    assert len(tokenizer.encode(_render(tokenizer, longest), add_special_tokens=False)) < 90


def test_tasks_are_different_reproducible_and_split_by_operands():
    train = tasks.arithmetic_tasks(500, seed=0, split="train")
    heldout = tasks.arithmetic_tasks(200, seed=0, split="heldout")
    assert train == tasks.arithmetic_tasks(500, seed=0, split="train")
    assert train != tasks.arithmetic_tasks(500, seed=1, split="train")
    assert len({t["question"] for t in train}) == 500
    assert not _pairs(train) & _pairs(heldout)
    assert {q["question"].split()[3] for q in heldout} == set(tasks.OPERATORS)
    for task in train + heldout:
        assert tasks.calculate(task["question"][len("What is ") : -1]) == task["answer"]
        assert tasks.exact_answer(task, task["answer"] + "\n") == 1.0


def _pairs(items):
    words = [task["question"].rstrip("?").split() for task in items]
    return {(int(w[2]), int(w[4])) for w in words}


@given(st.integers(), st.sampled_from([demos.CAPABLE, demos.MIXED]))
@settings(max_examples=200, deadline=None)
def test_no_demonstration_asks_a_held_out_problem(seed, quality):
    turns = demos.demonstrate(random.Random(seed), quality)
    question = turns[0].prompt.split("What is ")[1].split("?")[0].split()
    assert tasks.split_of(int(question[0]), int(question[2])) == "train"


def test_demonstrations_are_as_good_as_their_weights_say():
    rng = random.Random(0)
    made = [demos.demonstrate(rng, demos.MIXED) for _ in range(2000)]
    right = 0
    for turns in made:
        question = turns[0].prompt.split("What is ")[1].split("?")[0]
        right += len(turns) == 2 and turns[1].answer == f"{tasks.calculate(question)}<|im_end|>"
    assert right / 2000 == pytest.approx(demos.MIXED["good"], abs=0.04)


@given(st.integers(-(10**12), 10**12), st.sampled_from(tasks.OPERATORS), st.integers(-(10**12), 10**12), st.booleans())
def test_calculate_agrees_with_python(a, op, b, spaced):
    value = tasks.calculate(f"{a} {op} {b}" if spaced else f"{a}{op}{b}")
    if op == "/":
        assert value == (str(a // b) if b and a % b == 0 else "error: not an integer")
    else:
        assert value == str({"+": a + b, "-": a - b, "*": a * b}[op])


@pytest.mark.parametrize(
    "expression",
    ["", "47", "47 36", "47 ** 36", "1 + 2 + 3", "1.5 + 2", "a + 1", "__import__('os')", "True + 1", "1 +", "\0",
     "(" * 60, "9" * 40 + " * " + "9" * 40, "1 // 1", "'a' * 3"],
)  # fmt: skip
def test_calculate_refuses_anything_else(expression):
    assert tasks.calculate(expression) == "error: bad expression"


def test_only_the_bare_answer_is_rewarded():
    task = {"question": "What is 47 * 36?", "answer": "1692"}
    outputs = ("1692", " 1692\n", "1,692", "It is 1692", "1693", "", None, 1692)
    assert [tasks.exact_answer(task, output) for output in outputs] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_gsm8k_annotations_become_tasks(tmp_path):
    lines = [
        "<<48/2=24>>24 <<48+24=72>>72 and again <<48/2=24>>24",
        "<<12/60=0.2>>0.2 <<1+2+3=6>>6 <<5*5=26>>26 <<100000-1=99999>>99999 <<9-4=5>>5",
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": "?", "answer": text}) + "\n" for text in lines))
    gsm8k_tasks = runpy.run_path(str(EXAMPLE / "make_tasks.py"))["gsm8k_tasks"]
    found = gsm8k_tasks(file, split="train")
    assert [t["question"] for t in found] == ["What is 48 / 2?", "What is 48 + 24?", "What is 9 - 4?"]
    assert gsm8k_tasks(file, split="train", max_digits=1) == [{"question": "What is 9 - 4?", "answer": "5"}]
    with pytest.raises(DatasetError, match=r"no integer calculation of one step.*heldout"):
        gsm8k_tasks(file, split="heldout")
    assert [t["answer"] for t in found] == ["24", "72", "5"]


def test_gsm8k_errors_say_where(tmp_path):
    gsm8k_tasks = runpy.run_path(str(EXAMPLE / "make_tasks.py"))["gsm8k_tasks"]
    with pytest.raises(DatasetError, match="cannot read GSM8K"):
        gsm8k_tasks(tmp_path, split="train")
    (tmp_path / "x.jsonl").write_text('{"answer": "<<1+1=2>>"}\n[]\n')
    with pytest.raises(DatasetError, match="line=2"):
        gsm8k_tasks(tmp_path / "x.jsonl", split="train")


def test_the_agents_calculators_solve_every_task():
    pytest.importorskip("langchain_openai")
    from agl.trainer.quickstart.agent import build_agent, calculator

    example = runpy.run_path(str(EXAMPLE / "agent.py"))
    for task in tasks.arithmetic_tasks(100, seed=0, split="train"):
        arguments = {"expression": task["question"][len("What is ") : -1]}
        assert calculator.invoke(arguments) == example["calculator"].invoke(arguments) == task["answer"]
        assert example["reward"](task, task["answer"]) == 1.0
    assert calculator.name == example["calculator"].name == demos.TOOL_NAME
    assert build_agent().name == example["agent"].name == "solver"


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not in {GSM8K}; AGL_DATA names the folder that holds gsm8k/")
def test_gsm8k_itself(tmp_path):
    example = runpy.run_path(str(EXAMPLE / "make_tasks.py"))
    make_tasks, gsm8k_tasks = example["main"], example["gsm8k_tasks"]
    train = gsm8k_tasks(GSM8K, split="train")
    heldout = gsm8k_tasks(GSM8K, split="heldout")
    assert len(train) > 5000
    assert len(heldout) > 500
    assert not _pairs(train) & _pairs(heldout)
    assert not _pairs(heldout) & _pairs(tasks.arithmetic_tasks(2000, seed=0, split="train"))
    make_tasks(GSM8K, tmp_path / "new")
    for name, expected in (("train", train), ("heldout", heldout)):
        lines = (tmp_path / "new" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected
    assert len((tmp_path / "new" / "heldout-128.jsonl").read_text().splitlines()) == 128


@pytest.mark.parametrize("hidden", [64, 128, 256])
def test_from_scratch_it_copies_before_it_has_learned_anything(hidden, tmp_path):
    """Random tokens, twice: after each, what followed it the first time."""

    def copied(name, **options):
        made = make_policy(tmp_path / name, stages=(), hidden=hidden, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(made.directory)
        once = torch.randint(made.vocabulary, (16, 40), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model(torch.cat([once, once], 1)).logits[:, 40:-1].argmax(-1)
        return (expected == once[:, 1:]).float().mean()

    assert copied("with") > 0.04, "1 in 416 by chance"
    assert copied("without", induction=False) < 0.02
