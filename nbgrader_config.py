"""nbgrader's settings: where the notebooks of a class lie and how they are executed.

nbgrader runs this file with its configuration object as ``c``.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
GRADING = ROOT / "grading"
GRADING.mkdir(exist_ok=True)  # SQLite makes a database file, not the folder around it

# nbgrader calls `alembic` by name, so `.venv/bin/nbgrader` needs its own folder on the PATH even
# where the environment is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# Instructors edit solutions/, students open course/; whatever grading makes stays in grading/,
# which git ignores.
c.CourseDirectory.root = str(ROOT)
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "course"
c.CourseDirectory.source_with_tests_directory = "grading/source_with_tests"
c.CourseDirectory.solution_directory = "grading/solution"
c.CourseDirectory.submitted_directory = "grading/submitted"
c.CourseDirectory.autograded_directory = "grading/autograded"
c.CourseDirectory.feedback_directory = "grading/feedback"
c.CourseDirectory.db_url = f"sqlite:///{GRADING / 'gradebook.db'}"

# nbgrader copies every file it is not told to ignore, and the .py beside a notebook is its source,
# answers included.
c.CourseDirectory.ignore = ["*.py", "*.pyc", "__pycache__", ".ipynb_checkpoints", "feedback"]

c.ClearSolutions.code_stub = {
    "python": 'raise NotImplementedError("Write your answer here, then delete this line")'
}
c.ClearSolutions.text_stub = "*Write your answer here, in place of this line.*"

# A cell that runs too long is interrupted and scored 0, and the next cell has its turn. One that
# cannot even be interrupted fails this one submission a few seconds later, not the class.
c.Execute.timeout = 60
c.Execute.interrupt_on_timeout = True
c.Execute.startup_timeout = 60
