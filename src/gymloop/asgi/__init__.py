"""How an application is served: a thread of its own, a socket that is held already, bounds on slow clients.

thread     uvicorn's life in a thread
protocol   a client that opens a connection must also send its headers
"""
