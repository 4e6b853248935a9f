"""`LightningServer` and `LightningClient`: `agl serve` and `agl.Client` under the names and arguments people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agl.errors import ConfigError
from agl.extras import require

__all__ = ["LightningClient", "LightningServer"]


class LightningServer:
    """A training server, in this process.

    Args:
        model_path: a Hugging Face directory or hub id.
        rl_algorithm: "LightningRL", "grpo", "ppo", ...
        dataset_path: training tasks, JSON Lines.
        checkpoint_dir: the directory of runs and policies.
        batch_size: tasks per step.
        learning_rate: peak.
        num_epochs: passes over the tasks.
        host, port: where to listen. **settings: any other option of docs/service.md.
    """

    def __init__(
        self,
        model_path: str,
        rl_algorithm: str = "LightningRL",
        dataset_path: str | Path | None = None,
        checkpoint_dir: str | Path = "./checkpoints",
        batch_size: int | None = None,
        learning_rate: float | None = None,
        num_epochs: int | None = None,
        host: str | None = None,
        port: int | None = None,
        **settings: Any,
    ) -> None:
        from agl.trainer.algorithms.options import Settings

        require("LightningServer", "service")
        options = {
            "model": model_path,
            "algorithm": rl_algorithm,
            "directory": str(checkpoint_dir),
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "epochs": num_epochs,
            "host": host,
            "port": port,
            **settings,
        }
        self.settings = Settings.of(options, "LightningServer()")
        self.settings.check()
        self.dataset_path = None if dataset_path is None else Path(dataset_path)
        self.url: str | None = None

    def start(self) -> None:
        """Serve until Ctrl-C. Training starts when a client asks for it.

        Raises:
            AglError: it cannot serve.
        """
        from agl.trainer.http.aio import run_in_thread

        run_in_thread(self.start_async())

    async def start_async(self) -> None:
        """The same on the caller's event loop, until cancelled."""
        from agl.trainer.http.auth import Keys
        from agl.trainer.http.local_key import with_key
        from agl_service.server import serve
        from agl_service.service import Service

        def announce(service: Service) -> None:
            self.url = service.mount.url
            print(f"listening on {with_key(self.url, service.mount.keys.minted)}", flush=True)

        data: dict[Any, Path] = {} if self.dataset_path is None else {"train": self.dataset_path}
        await serve(self.settings, Keys.find(), announce, data=data)


class LightningClient:
    """The client of a `LightningServer`, which runs the agents.

    Args:
        server_url: the server's; AGENT_LIGHTNING_SERVER_URL, or port 8000 of this machine, if None.
        agent_function: `f(task)` or `f(resource, task)`, which returns its reward; or any agent.
        num_workers: rollouts at once.
        timeout: seconds per rollout.
        key: the operator's, if the server asks for one.
    """

    def __init__(
        self,
        server_url: str | None = None,
        agent_function: Any = None,
        num_workers: int | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> None:
        require("LightningClient", "service")
        from agl_service.client import Client, client_agent

        if agent_function is None:
            raise ConfigError("LightningClient() has no agent", hint="LightningClient(agent_function=my_agent)")
        self.client = Client(server_url, key)
        self.agent = client_agent(agent_function)
        self.num_workers = num_workers
        self.timeout = timeout

    def run(self, **settings: Any) -> Any:
        """Run the agent for the server until its run is done; what `agl.Client.train` returns, and raises."""
        limit = {} if self.timeout is None else {"timeout": self.timeout}
        return self.client.train(self.agent, self.num_workers, **limit, **settings)
