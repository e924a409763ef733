"""How a daemon's log looks: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import time

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """``{"time": …, "level": …, "logger": …, "message": …}``, and ``"error"`` with a traceback where there is one."""

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
    """Have everything that asyncdist logs, from ``level`` on, written to the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    ours = logging.getLogger("asyncdist")
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    ours.propagate = False
