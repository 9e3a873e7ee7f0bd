"""What does a script hold? A rig, the data of its case, and sessions of a layer, a Buffer or an engine."""
