"""A prompt search in a process that can be killed: `prompt_search.py gepa|apo URL DIRECTORY`."""

import sys
from pathlib import Path

from rules import apo, fit, gepa, template_agent

if __name__ == "__main__":
    name, url, directory = sys.argv[1:4]
    algorithm = gepa(url) if name == "gepa" else apo(url, branch_factor=1, beam_width=1)
    fit(algorithm, template_agent(url), Path(directory))
