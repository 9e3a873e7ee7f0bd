"""Which calls are made: SPMD scripts over a rig, and what they promise between steps."""
