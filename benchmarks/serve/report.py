"""The figures of loads: latencies, rates and goodput as rows, tables, and a picture."""
import statistics

from benchmarks import rounds
from training.plotting import plt, save

LIMITS = 1.0, 0.1  # seconds to the first token and a token, that goodput allows
COLOURS = {'ours': 'C0', 'llama-server': '0.5'}


def percentile(values, p):
    """The smallest value that p percent of the values do not exceed; None of no values."""
    values = sorted(values)
    return values[max(0, -(-len(values) * p // 100) - 1)] if values else None


def figures(loads):
    """
    The figures of the rounds of one way: a dict for JSON. Rates are medians of the rounds; latencies are those of the
    requests of all rounds, in milliseconds, [median, 99th percentile].

    ttft_ms: to the first token, from when a request was due. per_token_ms: the mean of its later tokens. end_to_end_ms:
    to its last token. goodput: requests a second within LIMITS. client_cpu: processor time of the client over that of
    the clock. left: requests that clients went away from; failed: those that were not answered as they should.
    """
    answers = [a for load in loads for a in load.answers]
    good = [a for a in answers if not a.error]
    failed = [a.error for a in answers if a.error not in ('', 'left')]

    def latency(of, these):
        return [None if v is None else 1e3 * v for v in (percentile([of(a) for a in these], p) for p in (50, 99))]
    return dict(
        requests=len(answers), left=len(answers) - len(good) - len(failed), failed=len(failed), error=failed[:1],
        tok_per_s=statistics.median(tok_per_s(load) for load in loads),
        ttft_ms=latency(lambda a: a.first_token_s, good),
        per_token_ms=latency(lambda a: a.per_token_s, [a for a in good if a.n_tokens > 1]),
        end_to_end_ms=latency(lambda a: a.seconds, good), goodput=statistics.median(goodput(load) for load in loads),
        requests_per_s=statistics.median(len(load.answers) / load.seconds for load in loads),
        client_cpu=statistics.median(load.client_cpu_s / load.seconds for load in loads),
        runs_tok_per_s=[tok_per_s(load) for load in loads])


def tok_per_s(load):
    """Generated tokens a second, of whole answers."""
    return sum(a.n_tokens for a in load.answers if not a.error) / load.seconds


def goodput(load):
    first, each = LIMITS
    return sum(not a.error and a.first_token_s <= first and a.per_token_s <= each for a in load.answers) / load.seconds


def ttft(load, p):
    """Percentile p of the seconds to the first token in one round; None where nothing was answered."""
    return percentile([a.first_token_s for a in load.answers if not a.error], p)


def over(loads, mine, theirs, of=tok_per_s):
    """The median over the rounds of a figure of one way over that of another. None where nothing was answered."""
    pairs = [(of(a), of(b)) for a, b in zip(loads[mine], loads[theirs])]
    return statistics.median(a / b for a, b in pairs) if all(a and b for a, b in pairs) else None


COLUMNS = (('tok/s', 9), ('req/s', 8), ('goodput', 9), ('TTFT p50', 10), ('p99', 8), ('a token', 9), ('p99', 7),
           ('whole', 8), ('p99', 8), ('client', 8))  # latencies in milliseconds
HEAD = f"{'server':<14}{'weights':<9}{'threads':<8}{'case':<16}" + ''.join(f'{name:>{n}}' for name, n in COLUMNS)


def line(row, case):
    """A row as a line under HEAD. case: what distinguishes it."""
    values = [row['tok_per_s'], row['requests_per_s'], row['goodput'], *row['ttft_ms'], *row['per_token_ms'],
              *row['end_to_end_ms']]
    digits = 0, 1, 1, 1, 1, 2, 2, 0, 0
    texts = ['-' if value is None else f'{value:,.{n}f}' for value, n in zip(values, digits)]
    texts.append(f"{row['client_cpu']:.0%}")
    failed = f"  {row['failed']} FAILED: {row['error'][0][-80:]}" if row['failed'] else ''
    return (f"{row['server']:<14}{row['weights']:<9}{row['threads'] or 'chosen':<8}{case:<16}"
            + ''.join(f'{text:>{n}}' for text, (_, n) in zip(texts, COLUMNS)) + failed)


def goal_line(what, figure, goal, at_most=False):
    return f"{what}: {'not compared' if figure is None else rounds.line(figure, goal, at_most).strip()}"


def plot(parts, title, path):
    """A row of pictures for each part, a column for each shape. parts: {one of PANELS: its rows}."""
    shapes = list(dict.fromkeys(row['shape'] for rows in parts.values() for row in rows))
    fig, axes = plt.subplots(len(parts), len(shapes), figsize=(6 * len(shapes), 3.2 * len(parts) + 0.4),
                             squeeze=False, layout='constrained')
    for (part, rows), line_of_axes in zip(parts.items(), axes):
        for shape, ax in zip(shapes, line_of_axes):
            mine = [row for row in rows if row['shape'] == shape]
            if not mine:
                ax.axis('off')
                continue
            PANELS[part](ax, mine)
            ax.set_title(f'{shape}: {part}', fontsize=9)
            ax.tick_params(labelsize=7)
    fig.suptitle(title, fontsize=9)
    save(fig, path)


def plot_closed(ax, rows):
    for server, weights in dict.fromkeys((row['server'], row['weights']) for row in rows):
        mine = [row for row in rows if (row['server'], row['weights']) == (server, weights)]
        ax.plot([row['clients'] for row in mine], [row['tok_per_s'] for row in mine], 'o-' if weights == 'float32' else
                's--', color=COLOURS[server], label=f'{server}, {weights}', markersize=4)
    counts = sorted({row['clients'] for row in rows})
    ax.set(xscale='log', xlabel='clients', ylabel='tokens/s')
    ax.set_ylim(0, 1.3 * max(row['tok_per_s'] for row in rows))  # room for the legend above the lines
    ax.set_xticks(counts, counts)
    ax.minorticks_off()
    ax.legend(fontsize=7, loc='upper left', ncols=2)


def plot_ttft(ax, rows):
    """p50 and p99 of the requests of all rounds. The p99 of arrivals is the median of those of the rounds."""
    y = range(len(rows), 0, -1)
    p50, p99 = zip(*(row['ttft_ms'] for row in rows))
    p99 = [1e3 * statistics.median(v or 0 for v in row['p99_ttft_s']) if 'p99_ttft_s' in row else all_rounds
           for row, all_rounds in zip(rows, p99)]
    for i, (values, shade, p) in enumerate(((p50, 1.0, 'p50'), (p99, 0.4, 'p99'))):
        bars = ax.barh([n - 0.35 * i for n in y], [v or 0 for v in values], height=0.33, alpha=shade,
                       color=[COLOURS[row['server']] for row in rows])
        ax.bar_label(bars, [f"{p} {v or 0:,.0f}" for v in values], padding=2, fontsize=6)
    ax.set_yticks(y, [f"{row['server']}, {row['weights']}, {row['case']}" for row in rows], fontsize=6)
    ax.set(xlabel='milliseconds to the first token')
    ax.margins(x=0.25)


PANELS = {'closed': plot_closed, 'arrivals': plot_ttft, 'prefix': plot_ttft}
