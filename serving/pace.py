"""How often the tokens of a stream are handed on, by the engine to its server and by the server to its client."""
# the shortest and the longest pause between two chunks of a stream, in seconds; a chunk has all tokens of its pause
PAUSE, LONGEST_PAUSE = 0.04, 0.2
CHUNKS = 400  # that all streams together write in a second, about: writing a chunk slows the model down


def pause(n_streams):
    """Seconds between two chunks of a stream, beside so many."""
    return min(max(PAUSE, n_streams / CHUNKS), LONGEST_PAUSE)
