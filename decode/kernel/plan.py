"""
What a step does before it writes anything: it checks all that it was given, and lists the slots that it will read.

All addresses of keys and values come from this list. Each sequence has one entry for each key that its new tokens see,
in the order of positions: first those of the sinks, then all from FIRST_POSITION to the last new token. Without a
window there are no sinks, and FIRST_POSITION is 0.
"""
from numba import njit

from decode.kernel import layout
from decode.kernel.vectors import bytes_at, ints_at, longs_at

# why a step is refused
STALE, BAD_TOKEN, BAD_POSITION, BAD_RUNS, NO_SLOT, WRITTEN_TWICE, WRITTEN_BY_ANOTHER = range(1, 8)


@njit
def plan(memory, sizes):
    """Check the step and make its list of slots. Returns 0, or why the step is refused; then nothing has changed."""
    probes, packed = longs_at(memory[layout.PROBES]), ints_at(memory[layout.PACKED_PROBES])
    for i in range(sizes[layout.N_PROBES]):
        if ints_at(probes[i])[0] != packed[i]:
            return STALE
    tokens, vocab_size = longs_at(memory[layout.TOKENS]), sizes[layout.VOCAB_SIZE]
    at, refused_at = 0, longs_at(memory[layout.REFUSED_AT])
    for row in range(sizes[layout.N_ROWS]):
        if not 0 <= tokens[row] < vocab_size:
            refused_at[1] = tokens[row]
            return BAD_TOKEN
    for seq in range(sizes[layout.N_SEQ]):
        refused_at[0] = seq
        refused, n = list_slots(memory, sizes, seq, at)
        if refused:
            return refused
        at += n
    refused = mark_written(memory, sizes) or find_overlap(memory, sizes)
    written, slots = bytes_at(memory[layout.WRITTEN]), longs_at(memory[layout.OFFSETS])
    for row in range(sizes[layout.N_ROWS]):
        written[slots[own_entry(memory, row)]] = 0
    if not refused:
        for i in range(at):
            slots[i] *= sizes[layout.SLOT_STRIDE]
    return refused


@njit
def list_slots(memory, sizes, seq, at):
    """
    Write the slots of a sequence to OFFSETS from `at` on, and its row of SEQUENCES. Returns (refused, how many).
    """
    starts, positions = longs_at(memory[layout.QUERY_STARTS]), longs_at(memory[layout.POSITIONS])
    of_row, slots = longs_at(memory[layout.SEQ_OF_ROW]), longs_at(memory[layout.OFFSETS])
    refused_at, side_by_side = longs_at(memory[layout.REFUSED_AT]), longs_at(memory[layout.SIDE_BY_SIDE])
    window, n_sink, n_slots = sizes[layout.WINDOW], sizes[layout.N_SINK], sizes[layout.N_SLOTS]
    first_row, end_row = starts[seq], starts[seq + 1]
    start = positions[first_row]
    end = start + end_row - first_row
    refused_at[1] = start
    if not 0 <= start <= end <= sizes[layout.MAX_POSITIONS]:
        return BAD_POSITION, 0
    for row in range(first_row, end_row):
        of_row[row] = seq
        if positions[row] != start + row - first_row:
            return BAD_POSITION, 0

    n_sinks, first = min(n_sink, end), max(n_sink, start - window + 1) if window else 0
    of_sequence, table = seq * layout.N_SEQUENCE_COLUMNS, longs_at(memory[layout.SEQUENCES])
    table[of_sequence + layout.FIRST_OFFSET], table[of_sequence + layout.N_SINKS] = at, n_sinks
    table[of_sequence + layout.FIRST_POSITION] = first
    runs, position, last_end, n = longs_at(longs_at(memory[layout.RUNS])[seq]), 0 if n_sinks else first, 0, 0
    for run in range(longs_at(memory[layout.N_RUNS])[seq]):
        run_position, run_slot, run_n = runs[3 * run], runs[3 * run + 1], runs[3 * run + 2]
        refused_at[1] = run_position
        if not (last_end <= run_position and 0 < run_n <= n_slots and 0 <= run_slot <= n_slots - run_n):
            return BAD_RUNS, 0
        last_end = run_position + run_n
        while run_position <= position < min(last_end, end):
            stop = min(last_end, n_sinks if position < n_sinks else end)
            for p in range(position, stop):
                slots[at + n] = run_slot + p - run_position
                side_by_side[at + n] = stop - p
                n += 1
            position = max(stop, first) if stop >= n_sinks else stop
    refused_at[1] = position
    return (NO_SLOT if position < end else 0), n


@njit
def own_entry(memory, row):
    """Where in OFFSETS the entry of a row's own position is."""
    table, seq = longs_at(memory[layout.SEQUENCES]), longs_at(memory[layout.SEQ_OF_ROW])[row]
    at, position = seq * layout.N_SEQUENCE_COLUMNS, longs_at(memory[layout.POSITIONS])[row]
    if position < table[at + layout.N_SINKS]:
        return table[at + layout.FIRST_OFFSET] + position
    return table[at + layout.FIRST_OFFSET] + table[at + layout.N_SINKS] + position - table[at + layout.FIRST_POSITION]


@njit
def mark_written(memory, sizes):
    """Mark the slots that are written. WRITTEN_TWICE if one is written twice."""
    written, slots, refused = bytes_at(memory[layout.WRITTEN]), longs_at(memory[layout.OFFSETS]), 0
    refused_at = longs_at(memory[layout.REFUSED_AT])
    for row in range(sizes[layout.N_ROWS]):
        slot = slots[own_entry(memory, row)]
        if written[slot]:
            refused_at[0] = longs_at(memory[layout.SEQ_OF_ROW])[row]
            refused_at[1] = longs_at(memory[layout.POSITIONS])[row]
            refused = WRITTEN_TWICE
        written[slot] = 1
    return refused


@njit
def find_overlap(memory, sizes):
    """WRITTEN_BY_ANOTHER if a slot that is written holds a key that a sequence has already."""
    written, slots = bytes_at(memory[layout.WRITTEN]), longs_at(memory[layout.OFFSETS])
    starts, refused_at = longs_at(memory[layout.QUERY_STARTS]), longs_at(memory[layout.REFUSED_AT])
    table = longs_at(memory[layout.SEQUENCES])
    for seq in range(sizes[layout.N_SEQ]):
        of_sequence = seq * layout.N_SEQUENCE_COLUMNS
        first, n_sinks = table[of_sequence + layout.FIRST_OFFSET], table[of_sequence + layout.N_SINKS]
        for i in range(first, own_entry(memory, starts[seq])):
            if written[slots[i]]:
                position = i - first
                if position >= n_sinks:
                    position += table[of_sequence + layout.FIRST_POSITION] - n_sinks
                refused_at[0], refused_at[1] = seq, position
                return WRITTEN_BY_ANOTHER
    return 0
