"""Log output of the store daemon: text lines for people, or one JSON object per line for machines. Called by `store`."""

from __future__ import annotations

import json
import logging
import time

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Writes ``{"time": …, "level": …, "logger": …, "pid": …, "message": …}``, and a traceback as ``"error"``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(form: str, level: str) -> None:
    """Write the records that asyncdist logs at ``level`` or above to the standard error, in a format of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logger = logging.getLogger("asyncdist")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
