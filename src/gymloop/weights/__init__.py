"""Moving weights from the policy into engines: ``snapshot`` is what moves, whatever carries it."""
