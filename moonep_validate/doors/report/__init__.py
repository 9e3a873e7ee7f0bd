"""How is it told? Terminal text for people, JSON and trace files for machines."""
