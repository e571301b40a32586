"""The engine's counters in the text format of Prometheus."""
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


def exposition(engine):
    return generate_latest(CollectorRegistry()), CONTENT_TYPE_LATEST
