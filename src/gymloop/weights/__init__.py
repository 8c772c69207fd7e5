"""Moving weights from the policy into engines: ``layout`` is what moves, ``transport`` says how, ``sender`` and
``receiver`` do it."""
