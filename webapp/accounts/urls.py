"""URLs of accounts: login, logout, passwords, sessions, secrets, team, theme."""

from django.contrib.auth.views import LogoutView
from django.urls import path

from webapp.accounts import password_views, secrets, sessions, views
from webapp.accounts.login import GuardedLogin

urlpatterns = [
    path("login/", GuardedLogin.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("team/", views.team_choose, name="team-choose"),
    path("settings/secrets/", secrets.secret_list, name="secrets"),
    path("settings/secrets/save/", secrets.secret_save, name="secret-save"),
    path(
        "settings/secrets/<slug:secret_id>/delete/",
        secrets.secret_remove,
        name="secret-remove",
    ),
    path("settings/sessions/", sessions.session_list, name="sessions"),
    path("settings/sessions/end/", sessions.session_end, name="session-end"),
    path("settings/password/", password_views.password_change, name="password"),
    path("password/forgotten/", password_views.password_forgotten, name="password-forgotten"),
    path(
        "password/new/<slug:uid>/<slug:token>/", password_views.password_new, name="password-new"
    ),
    path("theme/", views.theme_choose, name="theme"),
]
