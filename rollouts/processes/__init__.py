"""Every child process of the trainer is started, limited, watched and ended here, by process.open_process."""
