"""How long a run took to its first sampled tokens is told once, and recorded once."""

import time

from gymloop.observe.metrics import METRICS
from gymloop.training.first_tokens import FirstTokens


def test_only_the_first_reply_counts_and_its_metric_is_taken_once():
    said = []
    first = FirstTokens(time.monotonic() - 5.0, said.append)
    assert first.take_news() == {}, "nothing came yet"
    first.seen()
    first.seen()
    assert said == ["first sampled tokens after 5.0 s"]
    news = first.take_news()
    assert list(news) == ["startup/first_tokens_s"]
    assert 5.0 <= news["startup/first_tokens_s"] < 6.0
    assert METRICS["startup/first_tokens_s"].name == "startup/first_tokens_s", "declared by itself"
    first.seen()
    assert first.take_news() == {}, "a later step has no first tokens"
