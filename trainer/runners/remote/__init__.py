"""Workers on other machines, over HTTP."""
