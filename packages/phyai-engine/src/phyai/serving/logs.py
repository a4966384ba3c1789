"""Log lines as JSON objects on stderr."""

import json
import logging
import sys
import time

LOGGER = logging.getLogger("phyai.serving")


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, event, and the fields given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def log_as_json(level: int = logging.INFO) -> None:
    """Write the server's log to stderr, a JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


def event(name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one event with its fields."""
    LOGGER.log(level, name, extra={"fields": fields})
