"""How often the engine delivers tokens to the server, and how often the server writes a chunk of a stream."""
PAUSE, LONGEST_PAUSE = 0.04, 0.2  # seconds between two chunks of a stream, at least and at most
CHUNKS = 400  # the number of chunks that all streams together write in a second: each chunk takes time from the model


def pause(n_streams):
    """Seconds between two chunks of a stream, if there are n_streams streams."""
    return min(max(PAUSE, n_streams / CHUNKS), LONGEST_PAUSE)
