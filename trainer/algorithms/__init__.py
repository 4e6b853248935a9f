"""Algorithms: what decides which rollouts are run and how a policy changes by them."""

from agl.trainer.algorithms.baseline import Baseline
from agl.trainer.algorithms.distill import Distill
from agl.trainer.algorithms.groups import Device, Loss, Optimizer, Overlong, Sampling
from agl.trainer.algorithms.imitation import SFT
from agl.trainer.algorithms.policy_gradient import DAPO, GRPO, GSPO, PPO, REINFORCE, RLOO, DrGRPO, REINFORCEPlusPlus
from agl.trainer.algorithms.preference import DPO
from agl.trainer.algorithms.rejection import RFT
from agl.trainer.run.run import Algorithm

__all__ = [
    "DAPO",
    "DPO",
    "GRPO",
    "GSPO",
    "PPO",
    "RFT",
    "RLOO",
    "SFT",
    "Algorithm",
    "Baseline",
    "Device",
    "Distill",
    "DrGRPO",
    "Loss",
    "Optimizer",
    "Overlong",
    "REINFORCE",
    "REINFORCEPlusPlus",
    "Sampling",
]
