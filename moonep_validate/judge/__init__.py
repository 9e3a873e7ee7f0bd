"""Was it right: facts of a trace, oracles, checks, witnesses, waivers and the verdict."""
