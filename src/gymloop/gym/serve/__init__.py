"""An environment of gymloop as a server: NeMo Gym's contract spoken from the other side.

app        routes, and what becomes of an error
sessions   who is playing, bounded in number and in silence
body       what a request may carry
run        POST /run: whole rollouts, played here
aggregate  POST /aggregate_metrics
discovery  what a head server would say, so that none is needed
server     how all of it is served
"""
