"""Jobs over many files: prune, verify, report, analyze and inspect.

A prune job passes these files in turn:

    request     the options, and budgets by layer
    inputs      files, directories, patterns and URLs as inputs with names
    plan        each input and its output, as headers tell them; the manifest
    steps       the conversation of one input: which units it asks for, and the estimate
    engine      units of work, and threads that do them (`ray`: workers of a cluster)
    choose      the kept sets of a unit, and why a recorded certificate holds (`held_out`: a trial)
    sets        the records of layers and sets, and their sums
    write       an output with its certificate
    prune       the job: engines, driver, what is told of each input
    folder      the state of a job beside its outputs, for `--resume` and `report`
    results     reports of outputs, failures, and the result of the job

`report` reads outputs into one object, which `job_page` shows and `export` writes as tables.
`analyze` with `analyze_page`, `inspect` and `verify` are jobs of their own.
"""
