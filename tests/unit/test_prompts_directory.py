"""A directory of prompts: what was saved is loaded, and what cannot be loaded says so."""

from pathlib import Path

import pytest

import agl
from agl.agents.prompts import load_prompts, save_prompts
from agl.errors import ConfigError

PROMPTS = {
    "writer": agl.SystemPrompt("writer", "Write short.\r\n{sic}", "Write.\n"),
    "../a plan/ü": agl.PromptTemplate("Plan {question}."),
}


def test_saved_prompts_are_loaded_and_each_has_a_text_for_people(tmp_path: Path) -> None:
    save_prompts(tmp_path / "new" / "prompts", PROMPTS)
    assert load_prompts(tmp_path / "new" / "prompts") == PROMPTS
    texts = {p.read_bytes() for p in (tmp_path / "new" / "prompts").glob("*.txt")}
    assert texts == {b"Write short.\r\n{sic}", b"Plan {question}."}
    save_prompts(tmp_path / "new" / "prompts", {"writer": agl.SystemPrompt("writer", "Other.", "Write.\n")})
    assert load_prompts(tmp_path / "new" / "prompts")["writer"].text == "Other."


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"a": 1}', '{"a": {"type": "system_prompt"}}', '{"a": {"type": "value", "value": 1}}']
)
def test_a_directory_without_whole_prompts_is_an_error(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no prompts in"):
        load_prompts(tmp_path)
    (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(ConfigError, match="does not hold prompts"):
        load_prompts(tmp_path)


def test_an_edited_text_is_an_error_and_not_ignored(tmp_path: Path) -> None:
    save_prompts(tmp_path, PROMPTS)
    (tmp_path / "writer.txt").write_text("Write long.")
    with pytest.raises(ConfigError, match=r"edit the prompt there and delete writer\.txt"):
        load_prompts(tmp_path)


def test_only_prompts_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of type LLM, not a prompt"):
        save_prompts(tmp_path, {"model": agl.LLM("http://localhost/v1", "m")})
    assert not (tmp_path / "prompts.json").exists()
