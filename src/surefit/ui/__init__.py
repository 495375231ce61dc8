"""`surefit ui`: a local page to begin with rows, train and talk to the result; to write configs, plan, compare runs.

`app.py` has every route, `security.py` every check that a request passes first, `workspace.py` every path that may be
read or written, `templates/` the pages and `static/` the little JavaScript that makes them live. The pages' content
comes from the same functions as the command line's; `stages.py` names those that `cli/ui.py` passes in. Runs and chats
are processes of their own: `job_runner.py`, `chat_process.py`.
"""
