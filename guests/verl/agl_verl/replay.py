"""verl's replay buffer for one of several trainers that share TransferQueue: it sees its own trainer's rows alone.

Keys of prompts are random and those of rows begin with their prompt's, so rows of different trainers never share a
key; the buffer is the only part of verl's synchronous trainer that lists keys instead of naming them.
"""

from __future__ import annotations

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from agl_verl import manager


class OwnPrompts(ReplayBuffer):
    """verl makes it by its config (`trainer.v1.sampler.custom_sampler`)."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        own = manager.requested()
        for rows in self.partitions.values():
            for key in [key for key in rows if key.split("_")[0] not in own]:
                del rows[key]
        for keys in (self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys):
            for uids in keys.values():
                uids &= own
        for steps in self.prompt_global_steps.values():
            for uid in steps.keys() - own:
                del steps[uid]
