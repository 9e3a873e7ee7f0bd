"""From a case to a verdict: job, record, judge. Nothing else runs cases."""
