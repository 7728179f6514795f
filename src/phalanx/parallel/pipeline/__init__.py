"""Pipeline parallelism: schedules are tables, stages are cuts through an untouched forward, one interpreter runs both."""
