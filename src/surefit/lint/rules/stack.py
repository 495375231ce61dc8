"""STK: installed versions, against each other and against what the run asks for."""
