"""The optional parts of agl: which modules each brings, and the error that names what to install.

A missing part is noticed where its user asks for it: when a name of `agl` is read, or an algorithm or trainer is made.
"""

from __future__ import annotations

from importlib.util import find_spec

from agl.errors import MissingExtraError

SERVER = (
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "httptools",
    "httpx",
    "orjson",
    "pydantic",
    "packaging",
    "tenacity",
    "typer",
    "rich",
)
TRAINING = ("torch", "transformers", "safetensors", "peft", "renderers")
"""What loads, samples and trains a model."""
MODULES = {
    "local": (
        *TRAINING,
        *SERVER,
        "aiohttp",
        "cloudpickle",
        "yaml",
        # They come with the others.
        "anyio",
        "huggingface_hub",
        "jinja2",
        "tokenizers",
        "tqdm",
    ),
    "server": SERVER,
    "verl": ("agl_verl", "verl"),
    "vllm": ("vllm",),
    "gguf": ("gguf",),
    "structured": ("llguidance",),
    "quantize": ("bitsandbytes",),
    "postgres": ("psycopg",),
    "ray": ("ray",),
    "prices": ("genai_prices",),
    "prompts": ("agl_prompts", "gepa"),
    "sandboxes": ("agl_sandboxes",),
    "export": ("pyarrow", "opentelemetry.exporter"),
    "openai": ("openai",),
    "agentlightning": ("agl_agentlightning",),
    "massgen": ("agl_massgen",),
    "service": ("agl_service",),
    "environments": ("agl_environments", "openai"),
    "harnesses": ("agl_harnesses",),
    "plan": ("agl_plan",),
}
"""Extra -> modules that agl's own code imports; a module that several bring belongs to the first of them."""
_EXTRA_OF = {"agl.Client": "service"}
"""What needs less than the first."""


def require(what: str, extra: str, modules: tuple[str, ...] | None = None) -> None:
    """Raise `MissingExtraError` if a module of an extra (or of `modules`) is not installed; nothing is imported.

    Args:
        what: needs it, such as "agl.GRPO".
    """
    for module in MODULES[extra] if modules is None else modules:
        if find_spec(module) is None:
            raise missing(what, module, extra)


def missing(what: str, module: str, extra: str) -> MissingExtraError:
    """The error for a module that `what` needs and that an extra would bring."""
    return MissingExtraError(f"{what} needs {module}, which is not installed", hint=install_line(extra))


def install_line(extra: str) -> str:
    """How to install an extra, or several ("local,langchain"): from the clone, as agl is not on PyPI yet."""
    guests = ("agentlightning", "environments", "harnesses", "massgen", "plan", "prompts", "sandboxes", "service")
    package = f"./guests/{extra}" if extra in guests else f'".[{extra}]"'
    package += " ./guests/verl" if extra == "verl" else ""
    return f"in the root of the agl clone: pip install {package}"


def explained(what: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """The same for an import that failed; None where it has nothing to do with an extra."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if module in modules), None)
    return None if extra is None else missing(what, module, _EXTRA_OF.get(what, extra))
